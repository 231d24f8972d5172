"""Convolutional VQ autoencoders with the key names of VQGAN (Esser et al., arXiv 2012.09841), as in
Chameleon and MoVQGAN.

    codes = argmin_k |quant_conv(encoder(x)) - e_k|^2        x = decoder(post_quant_conv(e), e)

Level n of encoder and decoder works at 1 / 2^n of the image's sides. Keys and shapes of a
checkpoint determine levels, channels, blocks, attention, and whether the decoder is modulated. In
MoVQ (Zheng et al., arXiv 2209.09002) its norms are

    norm(h) * conv_y(e) + conv_b(e)

with the code vectors e upsampled to the size of h. Parameters have the names of the files, so no
key is renamed; ``DROP`` matches keys that only training needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from gen.core.errors import GenError

DROP = (r"^loss\.", r"^ema_", r"^model_ema\.", r"^quantize\.(?!embedding\.)", r"^colorize$")
GROUPS, EPS = 32, 1e-6
ROWS = 4096  # vectors whose distances to all codes are held at once

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Half:
    """Sizes of an encoder or a decoder.

    ``channels``: channels per level, full resolution first. ``blocks``: residual blocks per level.
    ``attention``: levels with attention after every block. ``middle``: attention in the middle.
    """

    channels: tuple[int, ...]
    blocks: int
    attention: tuple[int, ...]
    middle: bool

    @classmethod
    def of(cls, shapes: Shapes, name: str, levels: str) -> Half:
        """Read the sizes from shapes by key. Raises ``GenError`` for another network."""
        level_channels: dict[int, dict[int, int]] = {}
        for key, shape in shapes.items():
            if match := re.fullmatch(rf"{name}\.{levels}\.(\d+)\.block\.(\d+)\.conv1\.weight", key):
                level_channels.setdefault(int(match[1]), {})[int(match[2])] = shape[0]
        blocks = {len(b) for b in level_channels.values()}
        if sorted(level_channels) != list(range(len(level_channels))) or len(blocks) != 1:
            raise GenError(
                f"the weights have no {name} of a VQGAN; expected keys such as"
                f" {name}.{levels}.0.block.0.conv1.weight, as many per level"
            )

        def has(part):
            return any(k.startswith(f"{name}.{part}.") for k in shapes)

        channels = tuple(level_channels[n][0] for n in range(len(level_channels)))
        return cls(
            channels,
            blocks.pop(),
            tuple(n for n in range(len(level_channels)) if has(f"{levels}.{n}.attn.0")),
            has("mid.attn_1"),
        )


@dataclass(frozen=True)
class Sizes:
    """Sizes of the autoencoder.

    ``codes`` x ``width``: the codebook. ``latent``: channels between encoder and decoder.
    ``modulated``: norms of the decoder as in MoVQ.
    """

    encoder: Half
    decoder: Half
    codes: int
    width: int
    latent: int
    modulated: bool

    @classmethod
    def of(cls, shapes: Shapes) -> Sizes:
        """Read the sizes from shapes by key. Raises ``GenError`` for a checkpoint that lacks a
        part."""
        for key in (
            "quantize.embedding.weight",
            "quant_conv.weight",
            "post_quant_conv.weight",
            "encoder.conv_in.weight",
            "decoder.conv_in.weight",
        ):
            if key not in shapes:
                raise GenError(
                    f"the weights lack {key!r}; expected a whole VQGAN: encoder, quant_conv,"
                    " quantize, post_quant_conv and decoder"
                )
        codes, width = shapes["quantize.embedding.weight"]
        halves = Half.of(shapes, "encoder", "down"), Half.of(shapes, "decoder", "up")
        return cls(
            *halves,
            codes,
            width,
            shapes["post_quant_conv.weight"][0],
            "decoder.norm_out.conv_y.weight" in shapes,
        )


class Norm(nn.GroupNorm):
    """Group normalisation that ignores the code vectors."""

    def __init__(self, channels: int):
        super().__init__(GROUPS, channels, EPS)

    def forward(self, x: Tensor, vectors: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Modulated(nn.Module):
    """Group normalisation modulated by the code vectors, as in MoVQ."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norm_layer = Norm(channels)
        self.conv_y = nn.Conv2d(width, channels, 1)
        self.conv_b = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        vectors = F.interpolate(vectors, x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(vectors) + self.conv_b(vectors)


def norm(channels: int, width: int) -> nn.Module:
    """Build a norm. ``width``: size of the modulating vectors, 0 for none."""
    return Modulated(channels, width) if width else Norm(channels)


def conv(inside: int, out: int) -> nn.Conv2d:
    """Build a 3 x 3 convolution that keeps the resolution."""
    return nn.Conv2d(inside, out, 3, padding=1)


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, inside: int, out: int, width: int):
        super().__init__()
        self.norm1, self.conv1 = norm(inside, width), conv(inside, out)
        self.norm2, self.conv2 = norm(out, width), conv(out, out)
        self.nin_shortcut = nn.Conv2d(inside, out, 1) if inside != out else None

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x, vectors)))
        h = self.conv2(F.silu(self.norm2(h, vectors)))
        return h + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Attention(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norm = norm(channels, width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        h = self.norm(x, vectors)
        q, k, v = (
            rearrange(part(h), "b c h w -> b 1 (h w) c") for part in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(rearrange(out, "b 1 (h w) c -> b c h w", h=x.shape[-2]))


class Resize(nn.Module):
    """Down- or upsampling by 2."""

    def __init__(self, channels: int, up: bool):
        super().__init__()
        self.up = up
        self.conv = conv(channels, channels) if up else nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(
            F.interpolate(x, scale_factor=2.0, mode="nearest")
            if self.up
            else F.pad(x, (0, 1, 0, 1))
        )


class Level(nn.Module):
    """Residual blocks at one resolution, each with optional attention."""

    def __init__(self, inside: int, out: int, blocks: int, attention: bool, width: int):
        super().__init__()
        self.block = nn.ModuleList([Block(out if n else inside, out, width) for n in range(blocks)])
        self.attn = nn.ModuleList([Attention(out, width) for _ in range(blocks * attention)])

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        for n, block in enumerate(self.block):
            x = block(x, vectors)
            x = self.attn[n](x, vectors) if len(self.attn) else x
        return x


class Middle(nn.Module):
    """Blocks at the coarsest resolution."""

    def __init__(self, channels: int, attention: bool, width: int):
        super().__init__()
        self.block_1 = Block(channels, channels, width)
        self.attn_1 = Attention(channels, width) if attention else None
        self.block_2 = Block(channels, channels, width)

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        x = self.block_1(x, vectors)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x, vectors), vectors)


class Encoder(nn.Module):
    """Encoder: images [B, 3, h, w] -> latents [B, latent, H, W]."""

    def __init__(self, half: Half, latent: int):
        super().__init__()
        channels, last = half.channels, len(half.channels) - 1
        self.conv_in = conv(3, channels[0])
        self.down = nn.ModuleList(
            [
                Level(channels[max(0, n - 1)], c, half.blocks, n in half.attention, 0)
                for n, c in enumerate(channels)
            ]
        )
        for level, c in zip(self.down[:last], channels, strict=False):
            level.downsample = Resize(c, up=False)
        self.mid = Middle(channels[-1], half.middle, 0)
        self.norm_out, self.conv_out = norm(channels[-1], 0), conv(channels[-1], latent)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for n, level in enumerate(self.down):
            x = level(x, None)
            x = level.downsample(x) if n + 1 < len(self.down) else x
        return self.conv_out(F.silu(self.norm_out(self.mid(x, None))))


class Decoder(nn.Module):
    """Decoder: latents and code vectors [B, D, H, W] -> images [B, 3, h, w]."""

    def __init__(self, half: Half, latent: int, width: int):
        super().__init__()
        channels = (*half.channels, half.channels[-1])
        self.conv_in = conv(latent, channels[-1])
        self.mid = Middle(channels[-1], half.middle, width)
        levels = range(len(half.channels))
        self.up = nn.ModuleList(
            [
                Level(channels[n + 1], channels[n], half.blocks, n in half.attention, width)
                for n in levels
            ]
        )
        for level, c in zip(self.up[1:], channels[1:], strict=False):
            level.upsample = Resize(c, up=True)
        self.norm_out, self.conv_out = norm(channels[0], width), conv(channels[0], 3)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x), vectors)
        for n in reversed(range(len(self.up))):
            x = self.up[n](x, vectors)
            x = self.up[n].upsample(x) if n else x
        return self.conv_out(F.silu(self.norm_out(x, vectors)))


class TamingVQ(nn.Module):
    """Autoencoder between images [B, 3, h, w] in [-1, 1] and codes [B, H, W], one per ``factor`` x
    ``factor`` pixels."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes, self.factor = sizes, 2 ** (len(sizes.decoder.channels) - 1)
        self.encoder = Encoder(sizes.encoder, sizes.latent)
        self.quant_conv = nn.Conv2d(sizes.latent, sizes.width, 1)
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(sizes.codes, sizes.width)})
        self.post_quant_conv = nn.Conv2d(sizes.width, sizes.latent, 1)
        self.decoder = Decoder(sizes.decoder, sizes.latent, sizes.width * sizes.modulated)

    @property
    def codebook(self) -> Tensor:
        """Vectors [codes, width]."""
        return self.quantize["embedding"].weight

    @property
    def device(self) -> torch.device:
        return self.codebook.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codebook.dtype

    def encode(self, x: Tensor) -> Tensor:
        """Encode images [B, 3, h, w] to codes int64 [B, H, W] of the nearest vectors."""
        latents = self.quant_conv(self.encoder(x))
        rows = rearrange(latents, "b c h w -> (b h w) c")
        table = self.codebook
        near = [(table.square().sum(1) - 2 * part @ table.T).argmin(1) for part in rows.split(ROWS)]
        return torch.cat(near).view(len(x), *latents.shape[-2:])

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes int64 [B, H, W] to images [B, 3, h, w]."""
        vectors = rearrange(self.codebook[codes], "b h w c -> b c h w")
        return self.decoder(self.post_quant_conv(vectors), vectors)
