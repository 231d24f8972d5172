"""Length policies: how many tokens a draft model drafts in a round.

    constant     always as many
    heuristic    2 more after a round in which all drafts were accepted, 1 fewer after any other; from 1 to 4 times the
                 starting length. The rule of transformers' assisted generation
    confidence   up to as many, but none after a draft whose own probability q(x) is below a threshold

Guarantee: none of them changes the law of what is committed. Whether a token is drafted depends on the drafts before it,
never on itself: the last draft is submitted, doubtful or not. Dropping it once its value is known would bias the law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.registry import register


class LengthPolicy:
    """``lengths`` long [b]: drafts at most, of each row left in the batch, in the next round."""

    def __init__(self, rows: int, length: int, threshold: float, device: torch.device | str = "cpu"):
        self.length, self.threshold = length, threshold
        self.lengths = torch.full((rows,), length, device=device)

    def stop(self, mass: Tensor) -> Tensor:
        """Which rows draft no more in this round, after drafts of probability ``mass`` [b]: bool [b]."""
        return torch.zeros_like(mass, dtype=torch.bool)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """The outcome of a round, each long [b]."""

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [b])."""
        self.lengths = self.lengths[rows]


@register("length_policy", "constant")
class Constant(LengthPolicy):
    """As it is."""


@register("length_policy", "heuristic")
class Heuristic(LengthPolicy):
    """Row by row."""

    def learn(self, drafted, accepted):
        change = torch.where(accepted == drafted, 2, -1)
        self.lengths = (self.lengths + change).clamp(1, 4 * self.length)


@register("length_policy", "confidence")
class Confidence(LengthPolicy):
    """Stops after the first draft that the draft model itself holds for unlikely."""

    def stop(self, mass):
        return mass < self.threshold
