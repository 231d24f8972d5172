"""Tiny random next-scale models of images, in folders beside their frontend."""

from __future__ import annotations

from pathlib import Path

import torch

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.models.nets.grid_scales import GridScalesConfig, GridScalesModel
from gen.models.nets.scale_vq import ScaleVQModel

SCALES = ((1, 1), (2, 2), (3, 3), (4, 4))
CODES = 32


def tiny_vq(scales=SCALES, codes: int = CODES, seed: int = 0) -> ScaleVQModel:
    torch.manual_seed(seed)
    levels = (8, 8, 8, 8)  # 8 x 8 pixels per vector, and 2 x 2 of them per patch
    return ScaleVQModel(scales, codes, 2, 2, levels, norm_num_groups=4).eval()


def tiny_model(vq: ScaleVQModel, markov: bool, seed: int = 1, **more) -> GridScalesModel:
    torch.manual_seed(seed)
    quantize = vq.quantize
    config = GridScalesConfig(
        scales=quantize.sides,
        codes=len(quantize.embedding.weight),
        channels=quantize.embedding.weight.shape[1],
        markov=markov,
        tail_layers=int(markov),
        vocab_size=shapes.PAIRS,
        prefix_length=shapes.SLOTS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        **{
            "frontend": "image-scales-vq",
            "codebook_digest": codebook_digest(quantize.embedding.weight),
            **more,
        },
    )
    model = GridScalesModel(config)
    model.quantize.load_state_dict(quantize.state_dict())
    return model.eval()


def save_scales(folder: Path, **more) -> Path:
    """Write ``image-scales``, ``image-scales-masked`` and their frontend."""
    vq = tiny_vq()
    vq.save_pretrained(folder / "image-scales-vq")
    for name, markov in (("image-scales", False), ("image-scales-masked", True)):
        tiny_model(vq, markov, **more).save_pretrained(folder / name)
    return folder
