"""Tasks whose distribution over right answers is known, so that every error is the sampler's.

A modality brings such tasks (``Modality.oracle_bench``). ``gen bench --oracle`` measures masked
samplers on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from torch import Tensor

from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class Board:
    """Rows that are decoded together.

    Attributes:
        cases: name of the case of each row.
        keys: key of the random numbers of each row.
        target: makes a fresh target of all rows from sampling parameters.
        right: says of tokens [B, T] which rows are right answers.
        exact: figures per case that are known without measuring, among them ``one_step``, the
            share of right answers of a single forward pass.
    """

    cases: Sequence[str]
    keys: Sequence[int]
    target: Callable[[SamplingParams], Any]
    right: Callable[[Tensor], Sequence[bool]]
    exact: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Point:
    """Result of a sampler in a case: ``right`` of ``rows``, and ``nfe`` forward passes per row."""

    right: int
    rows: int
    nfe: float

    @property
    def accuracy(self) -> float:
        """Share of right rows."""
        return self.right / self.rows


def measure(board: Board, sampler: Sampler, sampling: SamplingParams) -> dict[str, Point]:
    """Return the result of a sampler on every row of a board, by case; the same every time."""
    out = sampler(board.target(sampling), CounterRNG(board.keys))
    found: dict[str, list[tuple[bool, int]]] = {case: [] for case in board.cases}
    for case, right, stats in zip(board.cases, board.right(out.tokens), out.stats, strict=True):
        found[case].append((bool(right), stats.nfe))
    return {
        case: Point(sum(r for r, _ in rows), len(rows), mean(n for _, n in rows))
        for case, rows in found.items()
    }
