"""Rounds of candidates: a sampler run on particles of some items, which may itself be a search."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from torch import Tensor

from gen.contracts.scorer import Evaluator, Scorer
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput
from gen.samplers.search.base import Particles, Search


class OwnersEvaluator:
    """Evaluator of a target whose items are particles (``gen.contracts.scorer.Evaluator``).

    Args:
        evaluator: evaluator of the items.
        owners: item of each particle, int64 [n].
    """

    def __init__(self, evaluator: Evaluator, owners: np.ndarray):
        self.evaluator, self.owners = evaluator, owners

    def scores(
        self, scorer: Scorer, tokens: Tensor, items: np.ndarray, known: Tensor | None = None
    ) -> np.ndarray:
        return self.evaluator.scores(scorer, tokens, self.owners[items], known)

    def answers(self, tokens: Tensor, items: np.ndarray) -> list[Hashable]:
        return self.evaluator.answers(tokens, self.owners[items])


def particles_of(
    search: Search, items: np.ndarray, branches: np.ndarray, draft: Any, canvas: Tensor | None
) -> Particles:
    """Make particles whose evaluator knows them, so that a search may run on them.

    Args:
        search: what the call shares.
        items: items that get particles, int64 [n], which may repeat.
        branches: branch of each particle of each item, int64 [n, P].
        draft: target of the draft model, or of each.
        canvas: canvas of all items or None.
    """
    made = Particles(search.target, search.rng, draft, canvas, items, branches)
    made.target.evaluator = OwnersEvaluator(search.evaluator, made.owners)
    return made


def draw(
    search: Search,
    sampler: Sampler,
    items: np.ndarray,
    branches: np.ndarray,
    *,
    draft: Any = None,
    canvas: Tensor | None = None,
    trace: bool = False,
) -> tuple[np.ndarray, SampleOutput]:
    """Draw candidates, and note their cost: the item of each, int64 [n P], and their output.

    The arguments are those of ``particles_of``, and the sampler.
    """
    made = particles_of(search, items, branches, draft, canvas)
    out = sampler(made.target, made.rng, draft=made.draft, canvas=made.canvas, trace=trace)
    search.add_costs(made.owners, out.stats)
    return made.owners, out
