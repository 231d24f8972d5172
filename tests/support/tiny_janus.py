"""Tiny Janus checkpoints in the published layout."""

from __future__ import annotations

import torch

CODES, SIDE = 40, 4


NAMES = [
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<begin_of_image>",
    "<end_of_image>",
    "<image_placeholder>",
    "<|unknown|>",
]


WORDS = "a cat dog red sits runs on the blue mat User Assistant : | > <| |> |>:".split()


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} :{% for c in m['content'] %} {{ c['text'] }}{% endfor"
    " %}{% endfor %}{% if add_generation_prompt %} Assistant :{% endif %}"
)


VQ = dict(
    embed_dim=8,
    num_embeddings=CODES,
    latent_channels=8,
    base_channels=32,
    channel_multiplier=[1, 2],
    num_res_blocks=1,
    projection_dim=32,
    image_token_embed_dim=32,
    num_hidden_layers=2,
)


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*NAMES, *WORDS])}, unk_token=NAMES[6])
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{NAMES[0]} $A", special_tokens=[(NAMES[0], 0)]
    )
    inner.add_special_tokens(NAMES)
    more = dict(boi_token=NAMES[3], eoi_token=NAMES[4], image_token=NAMES[5])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=NAMES[0],
        eos_token=NAMES[1],
        pad_token=NAMES[2],
        unk_token=NAMES[6],
        extra_special_tokens=more,
        chat_template=TEMPLATE,
    )


def written(path):
    from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

    torch.manual_seed(0)
    words = tokenizer()
    text = dict(
        model_type="llama",
        vocab_size=len(words) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    vision = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=2,
        mlp_ratio=2,
        projection_dim=32,
        num_image_tokens=SIDE**2,
    )
    model = JanusForConditionalGeneration(
        JanusConfig(text_config=text, vision_config=vision, vq_config=VQ)
    )
    for module in (
        model.model.generation_embeddings,
        model.model.generation_head.vision_head,
        model.model.vqmodel.quantize.embedding,
    ):
        torch.nn.init.normal_(module.weight)
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=2, generation_kwargs={"boi_token_id": 3}
    )
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path
