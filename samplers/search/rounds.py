"""Rounds of candidates: a sampler run on particles of some items, which may itself be a search."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput
from gen.samplers.search.base import Particles, Search


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

    Args:
        search: what the call shares.
        sampler: the sampler; it may be a search.
        items: items that get particles, int64 [n], which may repeat.
        branches: branch of each particle of each item, int64 [n, P].
        draft: target of the draft model, or of each.
        canvas: canvas of all items or None.
        trace: whether to record every step.
    """
    made = Particles(search.target, search.rng, draft, canvas, items, branches)
    out = sampler(made.target, made.rng, draft=made.draft, canvas=made.canvas, trace=trace)
    search.add_costs(made.owners, out.stats)
    return made.owners, out
