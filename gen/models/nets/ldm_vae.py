"""KL autoencoders with the key names of latent diffusion (Rombach et al., arXiv 2112.10752) as
``diffusers.AutoencoderKL``: weights such as MAR's ``kl16.ckpt``.

Attention, widths and number of blocks are read from the keys. Attention of these files consists of
1 x 1 convolutions, that of diffusers of linear layers: the same numbers without two axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.libraries import diffusers
from gen.models.load.weights import LazyWeights, Renames, Weights, fill, without_storage

DROP = (r"^loss\.", r"^model_ema\.")  # the discriminator and averages of training
GROUPS = 32

_RESNET = ((r"\.nin_shortcut\.", ".conv_shortcut."),)
_ATTENTION = (
    (r"\.norm\.", ".group_norm."),
    (r"\.([qkv])\.(?=weight|bias)", r".to_\1."),
    (r"\.proj_out\.", ".to_out.0."),
)


def renames(levels: int) -> Renames:
    """Return the renames from published keys to those of diffusers.

    The files count the decoder's levels from the pixels, diffusers in the order of computation.
    """
    up = [(rf"^decoder\.up\.{i}\.", f"decoder.up_blocks.{levels - 1 - i}.") for i in range(levels)]
    return (
        *_ATTENTION,
        *_RESNET,
        (r"^encoder\.down\.(\d+)\.", r"encoder.down_blocks.\1."),
        *up,
        (r"(_blocks\.\d+)\.block\.", r"\1.resnets."),
        (r"(_blocks\.\d+)\.attn\.", r"\1.attentions."),
        (r"(_blocks\.\d+)\.downsample\.", r"\1.downsamplers.0."),
        (r"(_blocks\.\d+)\.upsample\.", r"\1.upsamplers.0."),
        (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
        (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
        (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
        (r"\.norm_out\.", ".conv_norm_out."),
    )


class Linear(LazyWeights):
    """Lazy mapping of weights, with 1 x 1 convolutions of attention as matrices [out, in]."""

    def __init__(self, weights: LazyWeights):
        self.weights = weights
        self.shapes = {
            k: s[:2] if _is_attention_conv(k, s) else s for k, s in weights.shapes.items()
        }

    def __getitem__(self, key: str) -> Tensor:
        return self.weights[key].reshape(self.shapes[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict:
    """Read the arguments of ``AutoencoderKL`` from shapes by published key. Raises ``GenError`` if
    keys that determine sizes are missing."""
    first_blocks = {
        int(m[1]): k
        for k in shapes
        if (m := re.fullmatch(r"encoder\.down\.(\d+)\.block\.0\.conv1\.weight", k))
    }
    needed = ("encoder.conv_in.weight", "decoder.conv_out.weight", "post_quant_conv.weight")
    wrong = [k for k in needed if len(shapes.get(k, ())) != 4]
    if wrong or sorted(first_blocks) != list(range(len(first_blocks))) or not first_blocks:
        missing = wrong or [
            f"encoder.down.{i}.block.0.conv1.weight"
            for i in range(max(first_blocks, default=0) + 1)
            if i not in first_blocks
        ]
        raise GenError(
            "the weights are not those of an autoencoder with the keys of latent diffusion:"
            f" {', '.join(missing)} are missing or have another number of axes"
        )
    levels = len(first_blocks)

    def attends(part, i):
        return any(k.startswith(f"{part}.{i}.attn.") for k in shapes)

    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["post_quant_conv.weight"][0],
        "block_out_channels": tuple(shapes[first_blocks[i]][0] for i in range(levels)),
        "layers_per_block": len(
            {k.split(".")[4] for k in shapes if k.startswith("encoder.down.0.block.")}
        ),
        "down_block_types": tuple(
            "AttnDownEncoderBlock2D" if attends("encoder.down", i) else "DownEncoderBlock2D"
            for i in range(levels)
        ),
        "up_block_types": tuple(
            "AttnUpDecoderBlock2D" if attends("decoder.up", i) else "UpDecoderBlock2D"
            for i in reversed(range(levels))
        ),
        "norm_num_groups": GROUPS,
    }


def load_ldm_vae(
    path: str | Path,
    *,
    scaling_factor: float,
    device: str | torch.device = "cpu",
    dtype=torch.float32,
):
    """Load the ``diffusers.AutoencoderKL`` of a file or folder, with a ``scaling_factor`` for its
    latents. Raises ``GenError`` for files that cannot be read or hold more than plain tensors, and
    for weights that do not fit."""
    weights = Linear(Weights(path))
    used = {k: s for k, s in weights.shapes.items() if not any(re.search(p, k) for p in DROP)}
    config = config_of(used)
    autoencoder = diffusers().AutoencoderKL
    model = without_storage(lambda: autoencoder(**config, scaling_factor=scaling_factor))
    return fill(
        model,
        weights,
        rename=renames(len(config["block_out_channels"])),
        drop=DROP,
        device=device,
        dtype=dtype,
        name=path,
    )


def _is_attention_conv(key: str, shape: tuple[int, ...]) -> bool:
    return (
        re.search(r"\.attn[._].*\.(q|k|v|proj_out)\.weight$", key) is not None
        and len(shape) == 4
        and shape[2:] == (1, 1)
    )
