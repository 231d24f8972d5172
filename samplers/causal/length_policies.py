"""Length policies: how many tokens a draft model drafts in a round.

    constant     always as many
    heuristic    2 more after a round in which all drafts were accepted, 1 fewer after any other;
                 from 1 to 4 times the starting length. The rule of transformers' assisted
                 generation
    confidence   up to as many, but none after a draft whose own probability q(x) is below a
                 threshold

and, where the length is ``auto``, as many as make the time per token least (``AutoLength``,
``auto_width``).

Guarantee: none of them changes the distribution of what is committed. Whether a token is drafted
depends on the drafts before it, never on itself: the last draft is submitted, doubtful or not.
Dropping it once its value is known would bias the distribution.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.rows import RowOwner, RowState
from gen.samplers.engine.window import AutoWidth


class LengthPolicy(RowOwner):
    """Number of drafts of each row. Everything it looks at is on the host.

    Attributes:
        lengths: drafts of each row in the next step at most, int64 [b].
    """

    lengths = RowState(start=lambda policy: policy.length)

    def __init__(self, rows: int, length: int, threshold: float):
        self.length, self.threshold = length, threshold
        self.lengths = np.full(rows, length)

    @property
    def most(self) -> int:
        """Most drafts of any row in the next step."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def stop(self, mass: Tensor) -> Tensor | None:
        """Choose the rows that draft no more in this step, after drafts of probability ``mass``
        [b]: bool [b]; None where that is no reason to stop."""
        return None

    def observe(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn the outcome of a step, each int64 [b]."""

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """A round of ``width`` positions is over, in which the rows, which had ``starts`` [b],
        committed so many ``tokens`` [b]; for who looks at clocks."""


@register("length_policy", "constant")
class Constant(LengthPolicy):
    """Same number of drafts in every step."""


@register("length_policy", "heuristic")
class Heuristic(LengthPolicy):
    """Number of drafts that follows what was accepted, row by row."""

    def observe(self, drafted, accepted):
        self.lengths = (self.lengths + np.where(accepted == drafted, 2, -1)).clip(
            1, 4 * self.length
        )


@register("length_policy", "confidence")
class Confidence(LengthPolicy):
    """Stop after the first draft that the draft model itself finds unlikely."""

    def stop(self, mass):
        return mass < self.threshold


class AutoLength(LengthPolicy):
    """Draft length one below the positions of a step, of which ``auto`` knows how many pay; none at
    all if drafting does not."""

    def __init__(self, auto: AutoWidth, rows: int):
        super().__init__(rows, auto.width - 1, 0.0)
        self.auto = auto

    def over(self, width, starts, tokens):
        self.auto.observe(width, starts, tokens)
        if self.auto.width - 1 != self.length:
            self.length = self.auto.width - 1
            self.lengths = np.full_like(self.lengths, self.length)

    @property
    def most(self):
        return self.length
