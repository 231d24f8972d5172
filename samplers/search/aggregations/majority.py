"""Majority vote: the answer that most candidates give.

    a* = argmax_a sum_j w_j [a_j = a]      w_j: samples that candidate j stands for, 1 unless a
                                           search dropped others in its favour

Ties go to the answer with the higher total score, then to the one that came first. The output is
the first candidate with the chosen answer that has the highest score among them.

Reference: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models"
(arXiv 2203.11171).
Guarantee: approximate, relative to the most likely answer of the base, which it is as n grows.
Preset: ``majority_vote``.
Limit: n = 1 is ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.core.method import method
from gen.core.registry import register
from gen.samplers.search.aggregations.base import Aggregation, Ballot


@method(
    "majority_vote",
    sampler="best_of",
    about="return the most frequent answer of n samples",
    paper="2203.11171",
    title="Self-Consistency Improves Chain of Thought Reasoning in Language Models",
    params={"n": 16, "aggregation": "majority"},
    example={"n": 3},
)
@register("aggregation", "majority")
@dataclass(frozen=True)
class Majority(Aggregation):
    """Choose the most frequent answer; ties by total score, then the first."""

    def choose(self, ballot: Ballot) -> int:
        votes, scores = ballot.totals(ballot.weights), ballot.totals(ballot.scores * ballot.weights)
        answer = ballot.answers[ballot.first_of_most(votes, scores)]
        agrees = np.asarray([a == answer for a in ballot.answers], dtype=np.float64)
        return ballot.first_of_most(agrees, ballot.scores)

    def shares(self, ballot: Ballot) -> np.ndarray:
        return ballot.totals(ballot.weights) / ballot.weights.sum()
