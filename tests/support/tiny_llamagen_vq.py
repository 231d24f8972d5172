"""Tiny weights of LlamaGen's VQ image tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS, STRIDE = (32, 32, 64), 4


def vq_weights(
    widths=WIDTHS, depth=2, latent=24, codes=24, code_dim=8, seed=0, device="cpu"
) -> dict[str, Tensor]:
    """Random weights under the published keys: ``widths`` are channels per level, the first also of
    ``conv_in``."""
    out, noise = {}, torch.Generator().manual_seed(seed)

    def rand(*shape):
        return (
            torch.empty(shape, device="meta")
            if device == "meta"
            else torch.randn(shape, generator=noise, dtype=torch.float64)
        )

    def conv(key, inner, outer, size):
        out[key + ".weight"], out[key + ".bias"] = (
            rand(outer, inner, size, size) / (inner * size**2) ** 0.5,
            rand(outer) / 10,
        )

    def norm(key, n):
        out[key + ".weight"], out[key + ".bias"] = 1 + rand(n) / 5, rand(n) / 5

    def res(key, inner, outer):
        norm(key + ".norm1", inner), norm(key + ".norm2", outer)
        conv(key + ".conv1", inner, outer, 3), conv(key + ".conv2", outer, outer, 3)
        if inner != outer:
            conv(key + ".nin_shortcut", inner, outer, 1)

    def attention(key, n):
        norm(key + ".norm", n)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{key}.{part}", n, n, 1)

    for half, order, first, blocks in (
        ("encoder", widths, widths[0], depth),
        ("decoder", widths[::-1], widths[-1], depth + 1),
    ):
        before = first
        conv(f"{half}.conv_in", 3 if half == "encoder" else latent, first, 3)
        for n, width in enumerate(order):
            for m in range(blocks):
                res(f"{half}.conv_blocks.{n}.res.{m}", before, width)
                before = width
                if width == widths[-1] and n == (len(widths) - 1 if half == "encoder" else 0):
                    attention(f"{half}.conv_blocks.{n}.attn.{m}", width)
            if n < len(widths) - 1:
                resample = "downsample" if half == "encoder" else "upsample"
                conv(f"{half}.conv_blocks.{n}.{resample}.conv", width, width, 3)
        for n in (0, 2):
            res(f"{half}.mid.{n}", widths[-1], widths[-1])
        attention(f"{half}.mid.1", widths[-1])
        norm(f"{half}.norm_out", order[-1])
        conv(f"{half}.conv_out", order[-1], latent if half == "encoder" else 3, 3)
    out["quantize.embedding.weight"] = 3 * rand(codes, code_dim)
    out["quantize.codebook_used"] = torch.zeros(65536, device=device)
    conv("quant_conv", latent, code_dim, 1), conv("post_quant_conv", code_dim, latent, 1)
    return out
