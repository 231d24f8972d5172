"""VAR, HMAR and their autoencoder as they are published, with random weights: keys, shapes, files.
Used by test_var, test_hmar and the contract of families."""

from __future__ import annotations

from pathlib import Path

import torch
from mar_layout import Writer
from torch import Tensor

SIDES = (1, 2, 3, 4)
CLASSES, WIDTH, HEADS, BLOCKS = 10, 32, 4, 2
CODES, CHANNELS, SHARED = 24, 8, 4
LEVELS, LAYERS, WIDTHS = 3, 1, (32, 32, 64)  # of the autoencoder: 4 x 4 pixels are one vector
OPTIONS = {"scales": list(SIDES)}
TAIL = 8  # of HMAR's two files


def lengths(sides=SIDES) -> list[int]:
    return [side**2 for side in sides]


def write_block(w: Writer, at: str, shared: bool, l2_norm: bool) -> None:
    w.table(f"{at}.attn.mat_qkv.weight", 3 * WIDTH, WIDTH, scale=WIDTH**-0.5)
    w.table(f"{at}.attn.q_bias", WIDTH, scale=0.5)
    w.table(f"{at}.attn.v_bias", WIDTH, scale=0.5)
    w[f"{at}.attn.zero_k_bias"] = torch.zeros(WIDTH)
    if l2_norm:
        w.table(f"{at}.attn.scale_mul_1H11", 1, HEADS, 1, 1, around=1.4)
        w[f"{at}.attn.scale_mul_1H11"][:, 0] = 9.0  # above the limit
    w.layer(f"{at}.attn.proj", WIDTH, WIDTH)
    w.layer(f"{at}.ffn.fc1", 4 * WIDTH, WIDTH)
    w.layer(f"{at}.ffn.fc2", WIDTH, 4 * WIDTH)
    if shared:
        w.table(f"{at}.ada_gss", 1, 1, 6, WIDTH, scale=0.5)
    else:
        w.layer(f"{at}.ada_lin.1", 6 * WIDTH, WIDTH)


def write_head(w: Writer, prefix: str, codes: int) -> None:
    w.layer(f"{prefix}head_nm.ada_lin.1", 2 * WIDTH, WIDTH)
    w.layer(f"{prefix}head", codes, WIDTH)


def write_shell(w: Writer, sides, shared: bool, markov: bool) -> None:
    """What is neither block nor head, with the tables that the published files hold beside it."""
    counts = torch.tensor(lengths(sides))
    w.table("class_emb.weight", CLASSES + 1, WIDTH)
    w.table("pos_start", 1, lengths(sides)[0], WIDTH)
    w.table("pos_1LC", 1, sum(lengths(sides)), WIDTH)
    w.table("lvl_embed.weight", len(sides), WIDTH)
    if shared:
        w.layer("shared_ada_lin.1", 6 * WIDTH, WIDTH)
    level = torch.arange(len(sides)).repeat_interleave(counts)
    sees = level[:, None] == level if markov else level[:, None] >= level
    w["lvl_1L"] = level[None]
    w["attn_bias_for_masking"] = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[None, None]


def var_weights(
    seed: int = 0, sides=SIDES, shared=False, l2_norm=True, blocks=BLOCKS, codes=CODES, markov=False
) -> dict[str, Tensor]:
    w = Writer(seed)
    write_shell(w, sides, shared, markov)
    w.layer("word_embed", WIDTH, CHANNELS)
    for n in range(blocks):
        write_block(w, f"blocks.{n}", shared, l2_norm)
    write_head(w, "", codes)
    return dict(w)


def hmar_weights(seed: int = 0, base=1, tail=2, codes=CODES, shared=False) -> dict[str, Tensor]:
    """As published: one file with the blocks of both passes."""
    w = Writer(seed)
    write_shell(w, SIDES, shared, True)
    w.table("word_embed.weight", WIDTH, CHANNELS, scale=CHANNELS**-0.5)
    w.table("word_embed_bias", WIDTH, scale=0.3)
    w.table("mask_embed.weight", 1, WIDTH)
    for part, count in (("base", base), ("ns", tail), ("mask", tail)):
        for n in range(count):
            write_block(w, f"{part}_blocks.{n}", shared, True)
    for part in ("ns", "mask"):
        write_head(w, f"{part}_", codes)
    return dict(w)


def hmar_pair(seed: int = 0, depth: int = TAIL + 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As trained: the next-scale model, and the model of masked tokens that began as its copy."""
    base = var_weights(seed, blocks=depth, markov=True)
    other, mask = Writer(seed + 1), dict(base)
    mask["word_embed_bias"] = mask.pop("word_embed.bias")
    other.table("mask_embed.weight", 1, WIDTH)
    for n in range(depth - TAIL, depth):
        write_block(other, f"blocks.{n}", False, True)
    write_head(other, "", CODES)
    return base, {**mask, **other}


def merged(base: dict[str, Tensor], mask: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published single file of a pair, written down key by key."""
    out = {k: v for k, v in base.items() if not k.startswith(("blocks.", "head", "word_embed"))}
    out["word_embed.weight"], out["word_embed_bias"] = (
        base["word_embed.weight"],
        base["word_embed.bias"],
    )
    out["mask_embed.weight"] = mask["mask_embed.weight"]
    first = len({k.split(".")[1] for k in base if k.startswith("blocks.")}) - TAIL
    for key, value in base.items():
        if key.startswith("blocks."):
            _, number, rest = key.split(".", 2)
            n = int(number)
            out[f"base_blocks.{n}.{rest}" if n < first else f"ns_blocks.{n - first}.{rest}"] = value
            if n >= first:
                out[f"mask_blocks.{n - first}.{rest}"] = mask[key]
        elif key.startswith("head"):
            out[f"ns_{key}"], out[f"mask_{key}"] = value, mask[key]
    return out


def vae_weights(seed: int = 1, codes=CODES) -> dict[str, Tensor]:
    w = Writer(seed)

    def resnet(at: str, inner: int, out: int) -> None:
        w.norm(f"{at}.norm1", inner)
        w.layer(f"{at}.conv1", out, inner, 3, 3)
        w.norm(f"{at}.norm2", out)
        w.layer(f"{at}.conv2", out, out, 3, 3)
        if inner != out:
            w.layer(f"{at}.nin_shortcut", out, inner, 1, 1)

    def attention(at: str, width: int) -> None:
        w.norm(f"{at}.norm", width)
        w.layer(f"{at}.qkv", 3 * width, width, 1, 1)
        w.layer(f"{at}.proj_out", width, width, 1, 1)

    for half in ("encoder", "decoder"):
        resnet(f"{half}.mid.block_1", WIDTHS[-1], WIDTHS[-1])
        attention(f"{half}.mid.attn_1", WIDTHS[-1])
        resnet(f"{half}.mid.block_2", WIDTHS[-1], WIDTHS[-1])
    w.layer("encoder.conv_in", WIDTHS[0], 3, 3, 3)
    w.layer("decoder.conv_in", WIDTHS[-1], CHANNELS, 3, 3)
    inner = WIDTHS[0]
    for i, out in enumerate(WIDTHS):
        for j in range(LAYERS):
            resnet(f"encoder.down.{i}.block.{j}", inner, out)
            inner = out
            if i == LEVELS - 1:
                attention(f"encoder.down.{i}.attn.{j}", out)
        if i < LEVELS - 1:
            w.layer(f"encoder.down.{i}.downsample.conv", out, out, 3, 3)
    for i, out in reversed(list(enumerate(WIDTHS))):
        for j in range(LAYERS + 1):
            resnet(f"decoder.up.{i}.block.{j}", inner, out)
            inner = out
            if i == LEVELS - 1:
                attention(f"decoder.up.{i}.attn.{j}", out)
        if i:
            w.layer(f"decoder.up.{i}.upsample.conv", out, out, 3, 3)
    for half, out in (("encoder", CHANNELS), ("decoder", 3)):
        w.norm(f"{half}.norm_out", WIDTHS[-1] if half == "encoder" else WIDTHS[0])
        w.layer(f"{half}.conv_out", out, WIDTHS[-1] if half == "encoder" else WIDTHS[0], 3, 3)
    for name in ("quant_conv", "post_quant_conv"):
        w.layer(name, CHANNELS, CHANNELS, 3, 3)
    w.table("quantize.embedding.weight", codes, CHANNELS)
    w["quantize.ema_vocab_hit_SV"] = torch.ones(len(SIDES), codes)
    for n in range(SHARED):
        w.layer(f"quantize.quant_resi.qresi_ls.{n}", CHANNELS, CHANNELS, 3, 3)
    return dict(w)


def write_var(folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    """As the release lays it out: bare dictionaries of tensors, side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(var_weights() if weights is None else weights, folder / "var_d2.pth")
    torch.save(vae_weights(), folder / "vae_ch160v4096z32.pth")
    return folder


def write_hmar(folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(hmar_weights() if weights is None else weights, folder / "hmar-d3.pth")
    torch.save(vae_weights(), folder / "vae_ch160v4096z32.pth")
    return folder
