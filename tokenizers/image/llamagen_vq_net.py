"""The VQ autoencoder of LlamaGen (Sun et al., arXiv 2406.06525): convolutions, residual blocks,
attention at the coarsest level, and a codebook on the unit sphere.

    code(z) = argmax_k <z / |z|, e_k / |e_k|>          decode looks up e_k / |e_k|

Module names are the published keys. Sizes are read from the shapes of the weights. The sides of an
image are 2^(levels - 1) times those of its codes: 16 times for the widths (1, 1, 2, 2, 4) of five
levels, 8 times for the widths (1, 2, 2, 4) of four.
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

DROP = (r"^quantize\.codebook_used$",)  # statistics of training
GROUPS = 32


@dataclass(frozen=True)
class VQSizes:
    """Sizes of the autoencoder.

    ``stem``: channels at full resolution. ``widths``: channels per level, finest first. ``depth``:
    residual blocks per level, one more in the decoder. ``latent``: channels before the projection
    to ``code_dim``. ``codes``: size of the codebook.
    """

    stem: int
    widths: tuple[int, ...]
    depth: int
    latent: int
    codes: int
    code_dim: int

    @property
    def stride(self) -> int:
        """Pixels per code along each side."""
        return 2 ** (len(self.widths) - 1)


def vq_sizes_of(shapes: Mapping[str, tuple[int, ...]], name: str = "") -> VQSizes:
    """Read the sizes from the shapes of published weights by key. Raises ``GenError`` for weights
    of another network."""
    block = re.compile(r"encoder\.conv_blocks\.(\d+)\.res\.(\d+)\.conv1\.weight")
    blocks = {(int(m[1]), int(m[2])): s for k, s in shapes.items() if (m := block.fullmatch(k))}
    levels = 1 + max((level for level, _ in blocks), default=-1)
    needed = [
        "encoder.conv_in.weight",
        "encoder.conv_out.weight",
        "quantize.embedding.weight",
        *(f"encoder.conv_blocks.{n}.res.0.conv1.weight" for n in range(max(levels, 1))),
    ]
    absent = [k for k in needed if not shapes.get(k)]
    if absent:
        raise GenError(
            f"the weights of {name} are not those of LlamaGen's VQ: no {', '.join(absent)}"
        )
    stem, widths = shapes[needed[0]][0], tuple(blocks[n, 0][0] for n in range(levels))
    if any(c % GROUPS for c in (stem, *widths)):
        raise GenError(
            f"the VQ weights of {name} have {stem} and {', '.join(map(str, widths))} channels;"
            f" expected multiples of {GROUPS}"
        )
    codes, code_dim = (*shapes[needed[2]], 1)[:2]
    return VQSizes(
        stem,
        widths,
        1 + max(n for level, n in blocks if level == 0),
        shapes[needed[1]][0],
        codes,
        code_dim,
    )


def norm(channels: int) -> nn.GroupNorm:
    """Build the group normalisation of every block."""
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


class Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.norm2 = norm(inner), norm(outer)
        self.conv1, self.conv2 = (
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.Conv2d(outer, outer, 3, padding=1),
        )
        self.nin_shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return h + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Attention(nn.Module):
    """Single-head self-attention over all positions of a level."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (rearrange(part(h), "b c h w -> b (h w) c") for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(rearrange(out, "b (h w) c -> b c h w", h=x.shape[-2]))


class Down(nn.Module):
    """Downsampling by 2, padded on the right and at the bottom only."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    """Upsampling by 2."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks, with attention at the coarsest level, then resizing to the next level."""

    def __init__(
        self, inner: int, outer: int, depth: int, attends: bool, name: str, resize: nn.Module | None
    ):
        super().__init__()
        self.res = nn.ModuleList(Residual(outer if n else inner, outer) for n in range(depth))
        self.attn = nn.ModuleList(Attention(outer) for _ in range(depth if attends else 0))
        self._resize = name if resize is not None else None
        if resize is not None:
            self.add_module(name, resize)

    def forward(self, x: Tensor) -> Tensor:
        for n, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[n](x)
        return x if self._resize is None else getattr(self, self._resize)(x)


def middle(channels: int) -> nn.ModuleList:
    """Build the middle blocks, at the coarsest resolution."""
    return nn.ModuleList(
        [Residual(channels, channels), Attention(channels), Residual(channels, channels)]
    )


class Half(nn.Module):
    """Base of encoder and decoder: input convolution, middle and levels, output convolution."""

    def _ends(self, inner: int, first: int, last: int, outer: int) -> None:
        self.conv_in, self.conv_out = (
            nn.Conv2d(inner, first, 3, padding=1),
            nn.Conv2d(last, outer, 3, padding=1),
        )
        self.norm_out = norm(last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in self.order():
            x = part(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Encoder(Half):
    """Encoder: images [B, 3, h, w] -> latents [B, latent, H, W]."""

    def __init__(self, s: VQSizes):
        super().__init__()
        self._ends(3, s.stem, s.widths[-1], s.latent)
        last, inner = len(s.widths) - 1, (s.stem, *s.widths)
        self.conv_blocks = nn.ModuleList(
            Level(
                inner[n], width, s.depth, n == last, "downsample", Down(width) if n < last else None
            )
            for n, width in enumerate(s.widths)
        )
        self.mid = middle(s.widths[-1])

    def order(self) -> list[nn.Module]:
        return [*self.conv_blocks, *self.mid]


class Decoder(Half):
    """Decoder: latents [B, latent, H, W] -> images [B, 3, h, w]."""

    def __init__(self, s: VQSizes):
        super().__init__()
        widths = s.widths[::-1]
        self._ends(s.latent, widths[0], widths[-1], 3)
        self.mid = middle(widths[0])
        last, inner = len(widths) - 1, (widths[0], *widths)
        self.conv_blocks = nn.ModuleList(
            Level(inner[n], width, s.depth + 1, n == 0, "upsample", Up(width) if n < last else None)
            for n, width in enumerate(widths)
        )

    def order(self) -> list[nn.Module]:
        return [*self.mid, *self.conv_blocks]


class Codebook(nn.Module):
    """Codebook. ``embedding``: vectors [codes, D] of any length."""

    def __init__(self, s: VQSizes):
        super().__init__()
        self.embedding = nn.Embedding(s.codes, s.code_dim)

    @property
    def vectors(self) -> Tensor:
        """Vectors [codes, D] of unit length."""
        return F.normalize(self.embedding.weight.detach(), dim=-1)


class LlamaGenVQModel(nn.Module):
    """Autoencoder between images [B, 3, h, w] in [-1, 1] and codes int64 [B, H, W]."""

    def __init__(self, sizes: VQSizes):
        super().__init__()
        self.sizes = sizes
        self.encoder, self.decoder, self.quantize = Encoder(sizes), Decoder(sizes), Codebook(sizes)
        self.quant_conv, self.post_quant_conv = (
            nn.Conv2d(sizes.latent, sizes.code_dim, 1),
            nn.Conv2d(sizes.code_dim, sizes.latent, 1),
        )

    @property
    def device(self) -> torch.device:
        return self.quant_conv.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    def encode(self, x: Tensor) -> Tensor:
        """Encode images [B, 3, h, w] to codes int64 [B, H, W]."""
        z = F.normalize(self.quant_conv(self.encoder(x)), dim=1)
        table = self.quantize.vectors.T
        # one image at a time: the scores of all codes at all positions are large
        images = rearrange(z, "b c h w -> b h w c")
        return torch.stack([(image @ table).argmax(-1) for image in images])

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes int64 [B, H, W] to images [B, 3, h, w]."""
        vectors = rearrange(self.quantize.vectors[codes], "b h w c -> b c h w")
        return self.decoder(self.post_quant_conv(vectors))
