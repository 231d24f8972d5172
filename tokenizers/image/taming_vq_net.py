"""Convolutional VQ autoencoders with the key names of VQGAN (Esser et al., arXiv 2012.09841): those
of Chameleon and of MoVQGAN.

    codes = argmin_k |quant_conv(encoder(x)) - e_k|^2        x = decoder(post_quant_conv(e), e)

Level n of a half works at 1 / 2^n of the picture's sides. A checkpoint says by its keys and shapes
what it is: how many levels, channels and blocks, where attention stands, and whether the decoder is
modulated: in MoVQ (Zheng et al., arXiv 2209.09002) its norms are

    norm(h) * conv_y(e) + conv_b(e)

with the code vectors e enlarged to the size of h. Parameters are named as in the files, so no key
is renamed; ``DROP`` is what training left there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError

DROP = (r"^loss\.", r"^ema_", r"^model_ema\.", r"^quantize\.(?!embedding\.)", r"^colorize$")
GROUPS, EPS = 32, 1e-6
ROWS = 4096  # vectors whose distances to all codes are held at once

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Half:
    """An encoder or a decoder. ``channels``: of its levels, the picture's own first. ``blocks``:
    residual ones per level. ``attention``: the levels that have it after every block; ``middle``:
    whether the middle has it.
    """

    channels: tuple[int, ...]
    blocks: int
    attention: tuple[int, ...]
    middle: bool

    @classmethod
    def of(cls, shapes: Shapes, name: str, levels: str) -> Half:
        found: dict[int, dict[int, int]] = {}
        for key, shape in shapes.items():
            if match := re.fullmatch(rf"{name}\.{levels}\.(\d+)\.block\.(\d+)\.conv1\.weight", key):
                found.setdefault(int(match[1]), {})[int(match[2])] = shape[0]
        blocks = {len(b) for b in found.values()}
        if sorted(found) != list(range(len(found))) or len(blocks) != 1:
            raise GenError(
                f"the weights have no {name} of a VQGAN; expected keys such as"
                f" {name}.{levels}.0.block.0.conv1.weight, as many per level"
            )

        def has(part):
            return any(k.startswith(f"{name}.{part}.") for k in shapes)

        channels = tuple(found[n][0] for n in range(len(found)))
        return cls(
            channels,
            blocks.pop(),
            tuple(n for n in range(len(found)) if has(f"{levels}.{n}.attn.0")),
            has("mid.attn_1"),
        )


@dataclass(frozen=True)
class Sizes:
    """``codes`` x ``width``: the codebook. ``latent``: channels between the halves. ``modulated``:
    whether the decoder's norms are those of MoVQ."""

    encoder: Half
    decoder: Half
    codes: int
    width: int
    latent: int
    modulated: bool

    @classmethod
    def of(cls, shapes: Shapes) -> Sizes:
        """What a checkpoint with these shapes by key is. Raises ``GenError`` for one that lacks a
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
    def __init__(self, channels: int):
        super().__init__(GROUPS, channels, EPS)

    def forward(self, x: Tensor, vectors: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Modulated(nn.Module):
    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norm_layer = Norm(channels)
        self.conv_y = nn.Conv2d(width, channels, 1)
        self.conv_b = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        vectors = F.interpolate(vectors, x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(vectors) + self.conv_b(vectors)


def norm(channels: int, width: int) -> nn.Module:
    """``width``: of the vectors that modulate it, 0 for none."""
    return Modulated(channels, width) if width else Norm(channels)


def conv(inside: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(inside, out, 3, padding=1)


class Block(nn.Module):
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
    """One head over all places."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norm = norm(channels, width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        h = self.norm(x, vectors)
        q, k, v = (part(h).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        return x + self.proj_out(seen.unflatten(2, x.shape[-2:]))


class Resize(nn.Module):
    """Half or twice the sides."""

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
    def __init__(self, channels: int, attention: bool, width: int):
        super().__init__()
        self.block_1 = Block(channels, channels, width)
        self.attn_1 = Attention(channels, width) if attention else None
        self.block_2 = Block(channels, channels, width)

    def forward(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        x = self.block_1(x, vectors)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x, vectors), vectors)


class Encoder(nn.Module):
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
    """Pictures [B, 3, h, w] in [-1, 1] <-> codes [B, H, W], one for ``factor`` x ``factor``
    pixels."""

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
        """[codes, width]."""
        return self.quantize["embedding"].weight

    @property
    def device(self) -> torch.device:
        return self.codebook.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codebook.dtype

    def encode(self, x: Tensor) -> Tensor:
        """Pictures [B, 3, h, w] -> codes int64 [B, H, W], of the nearest vectors."""
        latents = self.quant_conv(self.encoder(x))
        rows = latents.permute(0, 2, 3, 1).reshape(-1, latents.shape[1])
        table = self.codebook
        near = [(table.square().sum(1) - 2 * part @ table.T).argmin(1) for part in rows.split(ROWS)]
        return torch.cat(near).view(len(x), *latents.shape[-2:])

    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, H, W] -> pictures [B, 3, h, w]."""
        vectors = self.codebook[codes].permute(0, 3, 1, 2)
        return self.decoder(self.post_quant_conv(vectors), vectors)
