"""MAR and its autoencoder as they are published, with random weights: keys, shapes, files. Used by
test_mar and test_mar_vae."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

WIDTH, DECODER_WIDTH, HEADS, BUFFER, SIDE, CLASSES, CHANNELS = 48, 32, 4, 3, 4, 10, 4
BLOCKS, HEAD_WIDTH, HEAD_DEPTH = 2, 24, 2
STEPS = 5  # of the diffusion head
OPTIONS = {"heads": HEADS, "num_sampling_steps": STEPS}
LEVELS, LAYERS, WIDTHS = 3, 1, (32, 32, 64)  # of the autoencoder: 4 x 4 pixels are one latent


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Writer(dict):
    """Weights by key, each with random numbers of a size at which every part of the network
    matters."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = numbers(seed)

    def table(self, key: str, *shape: int, scale: float = 1.0, around: float = 0.0) -> None:
        self[key] = (
            torch.randn(*shape, generator=self.random, dtype=torch.float64) * scale + around
        ).float()

    def layer(self, key: str, out: int, inner: int, *kernel: int) -> None:
        size = inner * torch.Size(kernel).numel()
        self.table(f"{key}.weight", out, inner, *kernel, scale=size**-0.5)
        self.table(f"{key}.bias", out, scale=0.2)

    def norm(self, key: str, width: int) -> None:
        self.table(f"{key}.weight", width, scale=0.2, around=1.0)
        self.table(f"{key}.bias", width, scale=0.2)


def trunk_weights(seed: int = 0) -> dict[str, Tensor]:
    w, length = Writer(seed), BUFFER + SIDE**2
    w.table("class_emb.weight", CLASSES, WIDTH)
    w.table("fake_latent", 1, WIDTH)
    w.layer("z_proj", WIDTH, CHANNELS)
    w.norm("z_proj_ln", WIDTH)
    w.table("encoder_pos_embed_learned", 1, length, WIDTH)
    w.table("mask_token", 1, 1, DECODER_WIDTH)
    w.table("decoder_pos_embed_learned", 1, length, DECODER_WIDTH)
    w.table("diffusion_pos_embed_learned", 1, SIDE**2, DECODER_WIDTH)
    w.layer("decoder_embed", DECODER_WIDTH, WIDTH)
    for half, width in (("encoder", WIDTH), ("decoder", DECODER_WIDTH)):
        w.norm(f"{half}_norm", width)
        for n in range(BLOCKS):
            at = f"{half}_blocks.{n}"
            w.norm(f"{at}.norm1", width)
            w.norm(f"{at}.norm2", width)
            w.layer(f"{at}.attn.qkv", 3 * width, width)
            w.layer(f"{at}.attn.proj", width, width)
            w.layer(f"{at}.mlp.fc1", 4 * width, width)
            w.layer(f"{at}.mlp.fc2", width, 4 * width)
    net = "diffloss.net"
    w.layer(f"{net}.time_embed.mlp.0", HEAD_WIDTH, 256)
    w.layer(f"{net}.time_embed.mlp.2", HEAD_WIDTH, HEAD_WIDTH)
    w.layer(f"{net}.cond_embed", HEAD_WIDTH, DECODER_WIDTH)
    w.layer(f"{net}.input_proj", HEAD_WIDTH, CHANNELS)
    for n in range(HEAD_DEPTH):
        at = f"{net}.res_blocks.{n}"
        w.norm(f"{at}.in_ln", HEAD_WIDTH)
        w.layer(f"{at}.mlp.0", HEAD_WIDTH, HEAD_WIDTH)
        w.layer(f"{at}.mlp.2", HEAD_WIDTH, HEAD_WIDTH)
        w.layer(f"{at}.adaLN_modulation.1", 3 * HEAD_WIDTH, HEAD_WIDTH)
    w.layer(f"{net}.final_layer.linear", 2 * CHANNELS, HEAD_WIDTH)
    w.layer(f"{net}.final_layer.adaLN_modulation.1", 2 * HEAD_WIDTH, HEAD_WIDTH)
    return dict(w)


def vae_weights(seed: int = 1) -> dict[str, Tensor]:
    """The keys of latent diffusion; the encoder's last level has attention and the decoder's levels
    have none, as in kl16.ckpt."""
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
        for part in ("q", "k", "v", "proj_out"):
            w.layer(f"{at}.{part}", width, width, 1, 1)

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
        if i:
            w.layer(f"decoder.up.{i}.upsample.conv", out, out, 3, 3)
    w.norm("encoder.norm_out", WIDTHS[-1])
    w.layer("encoder.conv_out", 2 * CHANNELS, WIDTHS[-1], 3, 3)
    w.norm("decoder.norm_out", WIDTHS[0])
    w.layer("decoder.conv_out", 3, WIDTHS[0], 3, 3)
    w.layer("quant_conv", 2 * CHANNELS, 2 * CHANNELS, 1, 1)
    w.layer("post_quant_conv", CHANNELS, CHANNELS, 1, 1)
    return dict(w)


def write_trunk(path: Path, averaged: dict[str, Tensor]) -> None:
    """As the training script saves it: the weights, their average, and what training needs to go
    on."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4}]}
    settings = argparse.Namespace(model="mar_tiny", num_sampling_steps="100")
    torch.save(
        {
            "model": trunk_weights(9),
            "model_ema": averaged,
            "optimizer": optimizer,
            "epoch": 399,
            "scaler": {"scale": 65536.0},
            "args": settings,
        },
        path,
    )


def write_vae(path: Path, weights: dict[str, Tensor]) -> None:
    """As latent diffusion saves it: with the discriminator of the training."""
    discriminator = {
        "loss.logvar": torch.zeros(()),
        "loss.discriminator.main.0.weight": torch.zeros(8, 3, 4, 4),
    }
    torch.save({"epoch": 3, "global_step": 12, "model": {**weights, **discriminator}}, path)
