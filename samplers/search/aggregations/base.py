"""Base of aggregations: which of an item's candidates is the answer.

``@register("aggregation", name)`` on a frozen dataclass in one file is all that a new one takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gen.core.registry import registry


@dataclass(frozen=True)
class Ballot:
    """Candidates of one item, n of them.

    Attributes:
        scores: score of each, float64 [n].
        answers: what each says; equal values where two agree. Empty where no rule reads them.
        weights: samples that each stands for, float64 [n].
    """

    scores: np.ndarray
    answers: Sequence[Hashable]
    weights: np.ndarray

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Add up values [n] over the candidates with the same answer: float64 [n]."""
        total: dict[Hashable, float] = {}
        for answer, value in zip(self.answers, values.tolist(), strict=True):
            total[answer] = total.get(answer, 0.0) + value
        return np.asarray([total[answer] for answer in self.answers])

    def first_of_most(self, *values: np.ndarray) -> int:
        """Return the first candidate that is highest in values [n], ties going on to the next."""
        left = np.arange(len(self.scores))
        for value in values:
            # sums of the same numbers in another order differ in their last digits
            left = left[np.isclose(value[left], value[left].max(), rtol=1e-12, atol=1e-12)]
        return int(left[0])


@dataclass(frozen=True)
class Aggregation(ABC):
    """Rule that chooses one of an item's candidates.

    Attributes:
        reads_answers: whether it compares what candidates say.
    """

    reads_answers: ClassVar[bool] = True

    @abstractmethod
    def choose(self, ballot: Ballot) -> int:
        """Return the number of the chosen candidate."""

    def shares(self, ballot: Ballot) -> np.ndarray | None:
        """Return the share that each candidate's answer has, float64 [n]; None without one."""
        return None


AggregationSpec = str | Mapping[str, Any] | Aggregation


def read_aggregation(spec: AggregationSpec, where: str = "sampler.aggregation") -> Aggregation:
    """Return the aggregation of a spec.

    Args:
        spec: name, ``{"name": ..., parameter: value}`` or an aggregation.
        where: parameter that holds it, for messages.

    Raises:
        GenError: the name or a parameter is unknown.
    """
    if isinstance(spec, Aggregation):
        return spec
    expected = "the name of an aggregation or {'name': ..., parameter: value}"
    return registry.build("aggregation", spec, where, expected)
