"""Weighted vote: the answer with the highest sum of scores.

    a* = argmax_a sum_j w_j r_j [a_j = a]

Ties go to the answer that came first. The output is the first candidate with the chosen answer that
has the highest score among them. Scores below 0 count against an answer.

Reference: Li et al., "Making Large Language Models Better Reasoners with Step-Aware Verifier"
(arXiv 2206.02336).
Guarantee: approximate, relative to the answer of the highest expected score p(a) E[r | a].
Preset: ``weighted_vote``.
Limit: n = 1 is ``base``; equal scores of all candidates are ``majority``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.core.method import method
from gen.core.registry import register
from gen.samplers.search.aggregations.base import Aggregation, Ballot


@method(
    "weighted_vote",
    sampler="best_of",
    about="return the answer with the highest sum of scores over n samples",
    paper="2206.02336",
    title="Making Large Language Models Better Reasoners with Step-Aware Verifier",
    params={"n": 16, "aggregation": "weighted"},
    example={"n": 3},
)
@register("aggregation", "weighted")
@dataclass(frozen=True)
class Weighted(Aggregation):
    """Choose the answer with the highest sum of scores; ties go to the first."""

    def choose(self, ballot: Ballot) -> int:
        answer = ballot.answers[ballot.first_of_most(ballot.totals(ballot.scores * ballot.weights))]
        agrees = np.asarray([a == answer for a in ballot.answers], dtype=np.float64)
        return ballot.first_of_most(agrees, ballot.scores)

    def shares(self, ballot: Ballot) -> np.ndarray | None:
        total = (ballot.scores * ballot.weights).sum()
        if (ballot.scores < 0).any() or not total:
            return None
        return ballot.totals(ballot.scores * ballot.weights) / total
