"""Aggregation ``best``: the candidate with the highest score, the first one of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.core.registry import register
from gen.samplers.search.aggregations.base import Aggregation, Ballot


@register("aggregation", "best")
@dataclass(frozen=True)
class Best(Aggregation):
    """Choose the first candidate with the highest score."""

    reads_answers: ClassVar[bool] = False

    def choose(self, ballot: Ballot) -> int:
        return int(ballot.scores.argmax())
