"""Training of codebooks by gradients: nearest codes with a straight-through gradient, and revival
of unused codes.

A codebook starts from k-means over encoder outputs after a warm-up without quantisation. An unused
code is moved to an encoder output. A residual chain quantises the residuals of its earlier stages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

POOL = 8192  # encoder outputs kept to start and to revive codes from
PERIOD = 50  # steps between revivals


def kmeans(points: Tensor, k: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Lloyd's algorithm: cluster centres [k, D] of points [N, D]. An empty cluster restarts at a
    random point.
    """

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
    """Nearest rows of a table [K, D] to vectors [N, D]: long [N]."""
    return torch.cdist(z.detach().float(), table.detach().float()).argmin(1)


class Chain:
    """Residual chain of tables [K, D]; a plain codebook is a chain of one.

    Args:
        tables: codebooks, trained in place.
        warm: steps without quantisation.
        settle: step from which unused codes are no longer revived.
        generator: generator of starts and revivals.
        commitment: weight of the encoder's loss.
    """

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

    def __call__(self, z: Tensor, learn: bool = True) -> tuple[Tensor, Tensor]:
        """Quantise vectors [N, D]. Returns them with the gradient of the unquantised ones, and the
        loss of codes and encoder.

        ``learn``: keep the vectors to start and to revive codes from; false to measure.
        """
        if learn:
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
            if learn:
                used.mul_(0.99).index_add_(0, ids, torch.ones(len(ids)))
            total, left = total + q, left - q.detach()
        return z + (total - z).detach(), loss

    @torch.no_grad()
    def on_step(self, step: int) -> None:
        """Start the codebooks after the warm-up, then revive unused codes until ``settle``. Call it
        after every step.
        """
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

    def state(self) -> dict[str, Any]:
        """Return what later steps depend on beside the tables."""
        return {
            "pool": self.pool,
            "used": self.used,
            "step": self.step,
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.pool, self.used, self.step = state["pool"], state["used"], state["step"]
        self.generator.set_state(state["generator"])

    @property
    def codes(self) -> float:
        """Number of codes in use, over all tables."""
        return float(sum((u > 1).sum() for u in self.used))
