"""Tournament: the worst candidate leaves, round by round, until one is left.

    s(j | S)  = number of i in S that j is better than, minus number of those better than j
    S         <- S without its j of lowest s(j | S), the last one of several;   until |S| = 1

A pairwise judge says which of two answers is better. It may be inconsistent (a > b > c > a): every
round counts again among those that are left. The default judge compares scores, and the outcome is
then that of ``best``.

Reference: Feng et al., "IRanker: Towards Ranking Foundation Model" (arXiv 2506.21638): iterative
decoding, which excludes the worst candidate step by step. Theirs is a trained language model that
reads all candidates at once; here a judge reads two.
Guarantee: approximate, relative to the judge's ranking.
Parameter: ``judge``, a function of two answers: above 0 where the first is better, below 0 where
the second is, 0 for a draw; None compares scores.
Preset: ``tournament``.
Limit: n = 1 is ``base``; without a judge it is ``best``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gen.core.errors import GenError, bad_type
from gen.core.method import method
from gen.core.registry import register
from gen.samplers.search.aggregations.base import Aggregation, Ballot


@method(
    "tournament",
    sampler="best_of",
    about="eliminate the worst of n samples round by round with a pairwise judge",
    paper="2506.21638",
    title="IRanker: Towards Ranking Foundation Model",
    params={"n": 8, "aggregation": "tournament"},
    example={"n": 3},
)
@register("aggregation", "tournament")
@dataclass(frozen=True)
class Tournament(Aggregation):
    """Eliminate the worst candidate round by round; ``judge`` compares two answers."""

    judge: Callable[[Hashable, Hashable], float] | None = None

    reads_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.judge is not None and not callable(self.judge):
            raise bad_type("aggregation.judge", self.judge, "a function of two answers, or None")

    def choose(self, ballot: Ballot) -> int:
        better = self.comparisons(ballot)
        left = list(range(len(ballot.scores)))
        while len(left) > 1:
            among = better[np.ix_(left, left)]
            standing = among.sum(1) - among.sum(0)
            # the last one of several of lowest standing leaves
            left.pop(len(left) - 1 - int(standing[::-1].argmin()))
        return left[0]

    def comparisons(self, ballot: Ballot) -> np.ndarray:
        """Find which candidate is better than which: int64 [n, n].

        Raises:
            GenError: the judge raises, or returns anything but a number.
        """
        n = len(ballot.scores)
        if self.judge is None:
            return (ballot.scores[:, None] > ballot.scores).astype(np.int64)
        better = np.zeros((n, n), dtype=np.int64)
        for i in range(n):
            for j in range(i + 1, n):
                verdict = self._verdict(ballot.answers[i], ballot.answers[j])
                better[i, j], better[j, i] = verdict > 0, verdict < 0
        return better

    def _verdict(self, one: Any, other: Any) -> float:
        """Ask the judge about two answers."""
        assert self.judge is not None, "asked only where there is a judge"
        try:
            verdict = float(self.judge(one, other))
        except Exception as error:  # a function of the caller's may raise anything
            raise GenError(
                f"aggregation.judge failed on {one!r} and {other!r}: {type(error).__name__}:"
                f" {error}"
            ) from error
        if verdict != verdict:
            raise GenError(
                f"aggregation.judge returned nan for {one!r} and {other!r}; expected a number"
            )
        return verdict
