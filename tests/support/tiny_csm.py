"""Tiny CSM checkpoints in the published layout."""

from __future__ import annotations

import torch
from published import save_quietly

Q, CODES, T, RATE, FRAME = 4, 64, 8, 8000, 160
EXTRA = [CODES, CODES + 1, CODES + 2]  # ids of the model that the codec has no codes for
WORDS = (
    "<pad> <bos> <unk> <eos> x <a> <e> [ ] 0 1 2 7 hello there how are you today my friend".split()
)


def tokenizer(folder):
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()]
    )
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    names = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def config_of(codec=(), **more):
    """The configuration: a model of ``Q`` codebooks over a codec that has two more."""
    from transformers import CsmConfig

    mimi = dict(
        model_type="mimi",
        sampling_rate=RATE,
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[5, 4, 4],
        codebook_size=CODES,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=Q + 2,
        num_semantic_quantizers=1,
        upsample_groups=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=50,
    ) | dict(codec)
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    size = mimi["codebook_size"] + len(EXTRA)
    depth = dict(
        num_codebooks=Q,
        backbone_hidden_size=32,
        vocab_size=size,
        max_position_embeddings=Q + 1,
        **shape,
    )
    model = dict(
        num_codebooks=Q,
        vocab_size=size,
        text_vocab_size=64,
        pad_token_id=0,
        codebook_pad_token_id=size - 1,
        codebook_eos_token_id=0,
        bos_token_id=1,
        audio_token_id=5,
        audio_eos_token_id=6,
        max_position_embeddings=64,
    )
    return CsmConfig(codec_config=mimi, depth_decoder_config=depth, **shape, **model | more)


def tiny(seed=0, codec=(), **more):
    """A model whose random weights hear their input: embeddings and codes far from each other."""
    from transformers import CsmForConditionalGeneration

    torch.manual_seed(seed)
    model = CsmForConditionalGeneration(config_of(codec, **more))
    for part in (model.backbone_model, model.depth_decoder, model.lm_head, model.embed_text_tokens):
        for name, weight in part.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=2.0 if "embed" in name else 0.3)
    for name, table in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):
            table.normal_()
    model.depth_decoder.generation_config.max_new_tokens = (
        model.depth_decoder.generation_config.min_new_tokens
    ) = Q - 1
    return model.eval()


def written(path, **more):
    save_quietly(tiny(**more), path)
    tokenizer(path)
    return path
