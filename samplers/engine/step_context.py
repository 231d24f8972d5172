"""Rows and positions of one step of a decoding loop, and its random decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from gen.core.rng import RNG


@dataclass
class StepContext:
    """Rows and positions of one step, and its random decisions: b rows, W columns.

    Attributes:
        rng: source of every random decision.
        rows: item of each row, long [b]; the same tensor as long as the rows stay.
        round: forward passes of each row before this one, long [b].
        start: committed tokens of each row, long [b].
        positions: grid positions of the columns, long [b, W].
        valid: columns that exist, bool [b, W].
        hidden_states: those of the forward pass by layer, [b, W, D]; None before it, or not needed.
    """

    rng: RNG
    rows: Tensor
    round: Tensor
    start: Tensor
    positions: Tensor
    valid: Tensor
    hidden_states: dict[str, Tensor] | None = field(default=None, kw_only=True)

    def categorical(
        self,
        logp: Tensor,
        purpose: str,
        active: Tensor,
        first: int | Tensor = 0,
        shared: bool = False,
    ) -> Tensor:
        """Draw token ids [b, L].

        Args:
            logp: log-probabilities [b, L, V].
            purpose: name of the decision, which is part of the noise's key.
            active: decisions that count, bool [b, L].
            first: the L columns begin with this one; or long [b], the one column of each row.
            shared: use the noise of the position, the same in every round.
        """
        if isinstance(first, Tensor):
            positions = self.positions.gather(1, first[:, None])
        elif first or logp.shape[1] < self.positions.shape[1]:
            positions = self.positions[:, first : first + logp.shape[1]]
        else:
            positions = self.positions
        return self.rng.categorical(
            logp, self.rows, positions, purpose, None if shared else self.round, active
        )

    def normal(self, purpose: str, size: int, columns: int, shared: bool = False) -> Tensor:
        """Draw standard normal noise, float64 [b, columns, size], of the first columns, as in
        ``categorical``."""
        return self.rng.normal(
            self.rows, self.positions[:, :columns], purpose, None if shared else self.round, size
        )

    def flip(self, p: Tensor, purpose: str, active: Tensor) -> Tensor:
        """Flip coins of probability ``p`` [b, L] for the first L columns: bool [b, L]."""
        return self.rng.flip(
            p, self.rows, self.positions[:, : p.shape[1]], purpose, self.round, active
        )


@dataclass
class CausalStep(StepContext):
    """Context of one step of the causal loop, which knows some of it on the host too.

    Attributes:
        widths: number of columns that exist, int64 [b], on the host.
        starts: ``start`` on the host, int64 [b].
        items: ``rows`` on the host, int64 [b].
        room: positions before the one at which a row stops or waits, int64 [b], on the host.
        left: ``room`` on the device, long [b].
        is_full: whether every row has all columns, as far as the host knows.
    """

    widths: np.ndarray
    starts: np.ndarray
    items: np.ndarray
    room: np.ndarray
    left: Tensor
    is_full: bool = False
