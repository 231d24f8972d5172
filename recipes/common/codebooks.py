"""Training of codebooks by gradients: nearest codes with a straight-through gradient, and what
keeps all codes in use.

A codebook starts from k-means over encoder outputs after a warm-up without quantisation, and a code
that nothing uses any more is put where an encoder output lies. A residual chain quantises what its
stages before left over.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

POOL = 8192  # encoder outputs kept to start and to revive codes from
PERIOD = 50  # steps between revivals


def kmeans(points: Tensor, k: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Lloyd's algorithm; an empty cluster restarts at a random point. [N, D] -> [k, D]."""

    def draw(n):
        return points[torch.randint(len(points), (n,), generator=generator)]

    centres = draw(k)
    for _ in range(rounds):
        near = torch.cdist(points, centres).argmin(1)
        count = torch.bincount(near, minlength=k)
        total = torch.zeros_like(centres).index_add_(0, near, points)
        centres = torch.where(count[:, None] > 0, total / count[:, None].clamp_min(1), draw(k))
    return centres


def nearest(z: Tensor, table: Tensor) -> Tensor:
    """The nearest rows of a table [K, D] to vectors [N, D]: long [N]."""
    return torch.cdist(z.detach().float(), table.detach().float()).argmin(1)


class Chain:
    """A residual chain of tables [K, D]; a plain codebook is a chain of one. Until step ``warm`` it
    quantises nothing."""

    def __init__(
        self,
        tables: list[Tensor],
        warm: int,
        settle: int,
        generator: torch.Generator,
        commitment: float = 0.25,
    ):
        self.tables, self.warm, self.settle, self.generator, self.commitment = (
            tables,
            warm,
            settle,
            generator,
            commitment,
        )
        self.pool = torch.empty(0, tables[0].shape[1])
        self.used = [torch.zeros(len(t)) for t in tables]
        self.step = 0

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [N, D] -> quantised ones with the gradient of the unquantised, and the loss of
        codes and encoder."""
        keep = torch.randperm(len(z), generator=self.generator)[:1024]
        self.pool = torch.cat([self.pool, z.detach().float()[keep]])[-POOL:]
        if self.step < self.warm:
            return z, z.new_zeros(())
        left, total, loss = z, torch.zeros_like(z), z.new_zeros(())
        for table, used in zip(self.tables, self.used, strict=True):
            ids = nearest(left, table)
            q = table[ids]
            loss = (
                loss + F.mse_loss(q, left.detach()) + self.commitment * F.mse_loss(left, q.detach())
            )
            used.mul_(0.99).index_add_(0, ids, torch.ones(len(ids)))
            total, left = total + q, left - q.detach()
        return z + (total - z).detach(), loss

    @torch.no_grad()
    def on_step(self, step: int) -> None:
        """After step ``step``: starts the codebooks when the warm-up is over, then revives unused
        codes until ``settle``."""
        self.step = step + 1
        revive = self.warm < self.step < self.settle and self.step % PERIOD == 0
        if self.step != self.warm and not revive:
            return
        left = self.pool
        for table, used in zip(self.tables, self.used, strict=True):
            if self.step == self.warm:
                table.copy_(kmeans(left, len(table), self.generator))
                used.fill_(10)
            else:
                dead = (used < 1).nonzero().flatten()
                table[dead] = left[torch.randint(len(left), (len(dead),), generator=self.generator)]
                used[dead] = 10
            left = left - table[nearest(left, table)]

    @property
    def codes(self) -> float:
        """Codes in use, of all tables."""
        return float(sum((u > 1).sum() for u in self.used))
