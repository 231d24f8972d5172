"""Tiny random folders of models that answer questions about images, as ``save_pretrained`` writes
them. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chameleon_files import name_of
from chat_templates import byte_tokenizer
from PIL import Image
from published import save_quietly

CODES = 32
COMMON = ["<pad>", "<s>", "</s>", "<mask>", "<image>", "<boi>", "<eoi>"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)
TEXT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=2
)
SIDE = {"height": 8, "width": 8}


def noise(seed: int, height: int = 10, width: int = 12) -> Image.Image:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def shaken(model: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """The model in float64 with larger weights of what encodes images, so that images matter."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.double().named_parameters():
        if any(
            part in name
            for part in ("vision", "aligner", "projector", "connector", "quantize.embedding")
        ):
            scale = 0.3 if p.ndim == 1 else p[0].numel() ** -0.5 * 1.5
            p.data.add_(scale * torch.randn(p.shape, generator=g, dtype=p.dtype))
        elif "vqmodel.quant_conv.weight" in name:
            p.data.mul_(30)  # so that codes differ
    return model.eval()


def _saved(folder: Path, model: Any, processor: Any) -> Path:
    model.generation_config.do_sample = False
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(model.generation_config, key, TEXT[key])
    save_quietly(shaken(model), folder)
    save_quietly(processor, folder)
    return folder


def llava(folder: Path, template: str | None = TEMPLATE) -> Path:
    import transformers as t

    torch.manual_seed(0)
    words = byte_tokenizer(COMMON, extra_special_tokens={"image_token": "<image>"})
    text = dict(model_type="llama", vocab_size=len(words) + 3, **TEXT)
    vision = dict(model_type="clip_vision_model", intermediate_size=24, **VISION)
    config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=4)
    pixels = t.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=SIDE)
    processor = t.LlavaProcessor(
        pixels,
        words,
        patch_size=2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    return _saved(folder, t.LlavaForConditionalGeneration(config), processor)


def llava_next(folder: Path, template: str | None = TEMPLATE) -> Path:
    import transformers as t

    torch.manual_seed(6)
    words = byte_tokenizer(COMMON, extra_special_tokens={"image_token": "<image>"})
    text = dict(model_type="llama", vocab_size=len(words) + 3, **TEXT)
    vision = dict(model_type="clip_vision_model", intermediate_size=24, **VISION)
    tiles = [[8, 16], [16, 8], [16, 16]]
    config = t.LlavaNextConfig(
        text_config=text, vision_config=vision, image_token_index=4, image_grid_pinpoints=tiles
    )
    pixels = t.LlavaNextImageProcessorPil(
        size={"shortest_edge": 8}, crop_size=SIDE, image_grid_pinpoints=tiles
    )
    processor = t.LlavaNextProcessor(
        pixels,
        words,
        patch_size=2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    return _saved(folder, t.LlavaNextForConditionalGeneration(config), processor)


def idefics3(folder: Path, template: str | None = TEMPLATE) -> Path:
    import transformers as t

    torch.manual_seed(7)
    names = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
    words = byte_tokenizer([*COMMON, *names])
    text = dict(model_type="llama", vocab_size=len(words) + 3, **TEXT)
    vision = dict(intermediate_size=24, **VISION)
    config = t.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=4, scale_factor=2, pad_token_id=0
    )
    pixels = t.Idefics3ImageProcessorPil(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
    )
    processor = t.Idefics3Processor(pixels, words, image_seq_len=4, chat_template=template)
    return _saved(folder, t.Idefics3ForConditionalGeneration(config), processor)


def janus(folder: Path, template: str | None = TEMPLATE) -> Path:
    import transformers as t

    torch.manual_seed(1)
    named = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    words = byte_tokenizer(COMMON, extra_special_tokens=named)
    text = dict(model_type="llama", vocab_size=len(words) + 3, **TEXT)
    vision = dict(mlp_ratio=2, projection_dim=32, num_image_tokens=16, **VISION)
    vq = dict(
        embed_dim=8,
        num_embeddings=CODES,
        latent_channels=8,
        base_channels=32,
        channel_multiplier=[1, 1],
        num_res_blocks=1,
        num_patches=4,
        projection_dim=32,
        image_token_embed_dim=32,
        num_hidden_layers=2,
    )
    config = t.JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=4)
    pixels = t.JanusImageProcessorPil(size=SIDE, min_size=4)
    processor = t.JanusProcessor(pixels, words, num_image_tokens=16, chat_template=template)
    return _saved(folder, t.JanusForConditionalGeneration(config), processor)


def chameleon(folder: Path, template: str | None = None) -> Path:
    import transformers as t

    torch.manual_seed(2)
    names = ["<racm3:break>", "<eoss>", "<reserved08706>", *map(name_of, range(CODES))]
    words = byte_tokenizer([*COMMON, *names], sep_token=names[2])
    vq = dict(
        embed_dim=8,
        num_embeddings=CODES,
        latent_channels=8,
        resolution=16,
        base_channels=32,
        channel_multiplier=[1, 1, 1],
        num_res_blocks=1,
    )
    config = t.ChameleonConfig(
        vocab_size=len(words) + 3,
        vocabulary_map={n: i for n, i in words.get_vocab().items() if n.startswith(("<", "IMG"))},
        vq_config=vq,
        **TEXT,
    )
    side = {"height": 16, "width": 16}
    pixels = t.ChameleonImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    processor = t.ChameleonProcessor(pixels, words, image_seq_length=16)
    if template is not None:
        words.chat_template = template
    return _saved(folder, t.ChameleonForConditionalGeneration(config), processor)


def emu3(folder: Path, template: str | None = TEMPLATE) -> Path:
    import transformers as t

    torch.manual_seed(4)
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(5)).tolist()
    names = ["<|extra_200|>", "<|extra_201|>", "<|image token|>"]
    names += [f"<|visual token {k:06d}|>" for k in order]  # ids of codes are in no order
    named = {
        "image_token": "<image>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
    }
    words = byte_tokenizer([*COMMON, *names], begins=False, extra_special_tokens=named)
    vq = dict(
        codebook_size=CODES,
        embed_dim=4,
        latent_channels=4,
        temporal_downsample_factor=4,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_resolutions=[],
        hidden_size=32,
        num_attention_heads=1,
    )
    config = t.Emu3Config(
        text_config=dict(vocab_size=len(words) + 3, **TEXT),
        vq_config=vq,
        vocabulary_map=words.get_vocab(),
    )
    pixels = t.Emu3ImageProcessor(min_pixels=16 * 16, max_pixels=32 * 32)
    processor = t.Emu3Processor(pixels, words, chat_template=template)
    return _saved(folder, t.Emu3ForConditionalGeneration(config), processor)


WRITERS: dict[str, Callable[..., Path]] = {
    "llava": llava,
    "llava:next": llava_next,
    "idefics3": idefics3,
    "janus": janus,
    "chameleon": chameleon,
    "emu3": emu3,
}
