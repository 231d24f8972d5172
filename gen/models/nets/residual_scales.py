"""Multi-scale residual vector quantiser of next-scale models (VAR, Tian et al., arXiv 2404.02905).

A feature map f [B, D, H, W] becomes one token map per scale k = 0..S-1 of sides (h_k, w_k), coarse
to fine, all over one codebook e. With the residual r = f and the sum f_hat = 0, every scale does

    ids_k = argmin_v |area(r, (h_k, w_k)) - e_v|^2          (the last scale is not resized)
    h     = phi_j(k)(bicubic(e[ids_k], (H, W)))             phi(h) = (1 - rho) h + rho conv3x3(h)
    f_hat = f_hat + h,    r = r - h

and the decoder of the frontend reads f_hat. A model predicts the ids of scale k + 1 from
``area(f_hat, (h_{k+1}, w_{k+1}))``. Scales share the convolutions phi (``phi_index``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError

Sides = tuple[tuple[int, int], ...]


def phi_index(scales: int, shared: int) -> list[int]:
    """Return the convolution of every scale, nearest in relative depth.

    With ``shared`` = 4 the convolutions stand at linspace(1/12, 11/12, 4), as in the released code;
    else in the middle of ``shared`` equal parts. Two convolutions may be equally near, and then
    rounding in float64 decides, as in the released code.

    Args:
        scales: number of scales S.
        shared: number of convolutions K.
    """
    margin = 1 / 3 / shared if shared == 4 else 1 / 2 / shared
    ticks = np.linspace(margin, 1 - margin, shared)
    depths = [k / (scales - 1) if scales > 1 else 0.0 for k in range(scales)]
    return [int(np.argmin(np.abs(ticks - depth))) for depth in depths]


class Phi(nn.Conv2d):
    """Convolution 3 x 3 whose output is blended with its input: (1 - rho) h + rho conv(h)."""

    def __init__(self, channels: int, rho: float):
        super().__init__(channels, channels, 3, padding=1)
        self.rho = abs(rho)

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 - self.rho) + super().forward(h) * self.rho


class SharedPhi(nn.Module):
    """Convolutions that scales share, with the key names of the published files."""

    def __init__(self, channels: int, rho: float, shared: int):
        super().__init__()
        self.qresi_ls = nn.ModuleList(Phi(channels, rho) for _ in range(shared))


class ResidualScales(nn.Module):
    """Residual quantiser over scales, see the module.

    Args:
        sides: (height, width) of every scale, coarse to fine; the last one is the feature map's.
        codes: vectors V of the codebook.
        channels: floats D of a vector.
        rho: share of the convolution in phi.
        shared: number of convolutions phi.

    Raises:
        GenError: scales that do not grow.
    """

    def __init__(
        self, sides: Sequence[Sequence[int]], codes: int, channels: int, rho=0.5, shared=4
    ):
        super().__init__()
        self.sides: Sides = tuple((int(h), int(w)) for h, w in sides)
        pairs = zip(self.sides, self.sides[1:], strict=False)
        if not self.sides or any(a[0] > b[0] or a[1] > b[1] for a, b in pairs):
            raise GenError(f"the scales are {list(self.sides)}; expected sides from small to large")
        self.embedding = nn.Embedding(codes, channels)
        self.quant_resi = SharedPhi(channels, rho, shared)
        self.phi_of = phi_index(len(self.sides), shared)

    @property
    def lengths(self) -> list[int]:
        """Positions of every scale."""
        return [h * w for h, w in self.sides]

    def nearest(self, z: Tensor) -> Tensor:
        """Find the nearest codes of vectors [N, D]: long [N]."""
        table = self.embedding.weight.to(z.dtype)
        distance = (z * z).sum(1, keepdim=True) + (table * table).sum(1) - 2 * z @ table.T
        return distance.argmin(1)

    def down(self, f: Tensor, scale: int) -> Tensor:
        """Reduce a map [B, D, H, W] to the sides of a scale by averages of areas."""
        if self.sides[scale] == self.sides[-1]:
            return f
        return F.interpolate(f, size=self.sides[scale], mode="area")

    def up(self, vectors: Tensor, scale: int) -> Tensor:
        """Enlarge the vectors of a scale [B, n_k, D] and convolve them: [B, D, H, W]."""
        h = vectors.transpose(1, 2).unflatten(2, self.sides[scale])
        if self.sides[scale] != self.sides[-1]:
            h = F.interpolate(h, size=self.sides[-1], mode="bicubic")
        return self.quant_resi.qresi_ls[self.phi_of[scale]](h)

    def add(self, f_hat: Tensor, ids: Tensor, scale: int) -> Tensor:
        """Add the token map of a scale, long [B, n_k], to a sum [B, D, H, W]."""
        return f_hat + self.up(self.embedding(ids), scale)

    def own(self, ids: Tensor, hidden: Tensor, scale: int, leak: bool = False) -> Tensor:
        """Reduce the known tokens of a scale to its own sides: [B, n_k, D].

        Masked tokens are zero before they are enlarged, since bicubic weights and phi would carry
        them to their neighbours. The released HMAR does not do so.

        Args:
            ids: tokens of the scale, long [B, n_k]; those of masked positions are not read.
            hidden: bool [B, n_k], masked positions.
            scale: the scale.
            leak: keep the masked tokens, as the published weights were trained.
        """
        vectors = self.embedding(ids if leak else ids.masked_fill(hidden, 0))
        if not leak:
            vectors = vectors.masked_fill(hidden[..., None], 0.0)
        return self.down(self.up(vectors, scale), scale).flatten(2).transpose(1, 2)

    def zeros(self, batch: int) -> Tensor:
        """Make the sum before the first scale, [B, D, H, W]."""
        weight = self.embedding.weight
        return weight.new_zeros(batch, weight.shape[1], *self.sides[-1])

    def encode(self, f: Tensor) -> Tensor:
        """Quantise feature maps [B, D, H, W] to token maps, flat and coarse to fine: long [B, T].

        Raises:
            GenError: maps of other sides.
        """
        if tuple(f.shape[2:]) != self.sides[-1]:
            raise GenError(
                f"the feature maps have sides {tuple(f.shape[2:])}; expected {self.sides[-1]}, the"
                " last scale"
            )
        r, ids = f, []
        for scale in range(len(self.sides)):
            z = self.down(r, scale).flatten(2).transpose(1, 2)
            ids.append(self.nearest(z.flatten(0, 1)).view(len(f), -1))
            r = r - self.up(self.embedding(ids[-1]), scale)
        return torch.cat(ids, 1)

    def decode(self, ids: Tensor) -> Tensor:
        """Sum the token maps, long [B, t], of the first scales, or of all: [B, D, H, W]."""
        f_hat, ends = self.zeros(len(ids)), np.cumsum(self.lengths).tolist()
        whole = self.lengths[: ends.index(ids.shape[1]) + 1]
        for scale, part in enumerate(ids.split(whole, 1)):
            f_hat = self.add(f_hat, part, scale)
        return f_hat

    def inputs(self, ids: Tensor) -> Tensor:
        """Reduce, for every scale but the first, the sum of the scales before it: [B, T - n_0, D].

        They are what a model reads in training, given the ids, long [B, T].
        """
        f_hat, out = self.zeros(len(ids)), []
        for scale, part in enumerate(ids.split(self.lengths, 1)[:-1]):
            f_hat = self.add(f_hat, part, scale)
            out.append(self.down(f_hat, scale + 1).flatten(2).transpose(1, 2))
        return torch.cat(out, 1)
