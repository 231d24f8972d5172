"""Tiny Emu3 checkpoints in the published layout."""

from __future__ import annotations

import torch

CODES, WORDS = (
    48,
    "a cat dog red sits runs on the blue mat . , lowres * 1 2 3 4 5 6 7 8 9 0".split(),
)


NAMES = [
    "<|endoftext|>",
    "<image>",
    *(f"<|extra_{n}|>" for n in (200, 201, 203, 204)),
    "<|image start|>",
    "<|image end|>",
    "<|image token|>",
]


VQ = dict(
    codebook_size=CODES,
    embed_dim=4,
    latent_channels=4,
    temporal_downsample_factor=4,
    base_channels=32,
    channel_multiplier=[1, 2],
    num_res_blocks=1,
    attn_resolutions=[1],
    hidden_size=64,
    num_attention_heads=1,
)


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers

    order = torch.randperm(
        CODES, generator=torch.Generator().manual_seed(5)
    ).tolist()  # ids of codes are in no order
    words = [*NAMES, *(f"<|visual token {k:06d}|>" for k in order), *WORDS]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=NAMES[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(words[: len(NAMES) + CODES])
    more = dict(
        image_token=NAMES[1],
        eof_token=NAMES[3],
        boi_token=NAMES[6],
        eoi_token=NAMES[7],
        image_wrapper_token=NAMES[8],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=NAMES[4],
        eos_token=NAMES[5],
        pad_token=NAMES[0],
        unk_token=NAMES[0],
        extra_special_tokens=more,
    )


def written(path):
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    torch.manual_seed(0)
    words = tokenizer()
    text = dict(
        vocab_size=len(words) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=4,
        eos_token_id=5,
    )
    model = Emu3ForConditionalGeneration(
        Emu3Config(text_config=text, vq_config=VQ, vocabulary_map=words.get_vocab())
    )
    torch.nn.init.normal_(model.model.vqmodel.quantize.embedding.weight)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path
