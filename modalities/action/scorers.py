"""Rewards of action chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import Scorer
from gen.core.registry import register
from gen.modalities.action.checker import goal_error

FARTHEST = 2.0  # metres; an invalid chunk is farther from the goal than the table is wide


@register("scorer", "goal_distance")
@dataclass(frozen=True)
class GoalDistance(Scorer):
    """Negated distance in metres from the goal at the end of a chunk; an invalid one is 2 away."""

    modalities: ClassVar[tuple[str, ...]] = ("action",)
    about: ClassVar[str] = "minus the distance from the goal at the end in metres; -2 to 0"

    def score(self, samples):
        errors = [goal_error(s.media.action, s.media.situation.state) for s in samples]
        return [-min(error, FARTHEST) for error in errors]
