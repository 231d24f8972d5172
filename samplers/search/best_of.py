"""Best of n: draw n samples, return the one with the highest score.

    x_1, ..., x_n ~ p,   out = x_k,  k = the first argmax of r(x_k)

    P(out = x) = p(x) (F(r)^n - F(r-)^n) / (F(r) - F(r-))     r = r(x), F the cdf of r under p,
                                                              F(r-) its limit from below

References: Stiennon et al., "Learning to summarize from human feedback" (arXiv 2009.01325); with a
rater of images, the inference-time scaling of Lumina-mGPT 2.0 (arXiv 2507.17801).
Guarantee: that of ``base``, relative to the best of n of the base's reference: the
distribution above is exact where the base is.
Parameters: ``n``, ``aggregation`` (``best``; ``majority``, ``weighted`` and ``tournament`` stand
in ``gen.samplers.search.aggregations``, with their rules and references).
With a ``budget``, candidates are drawn one after the other until the item has spent it.
Presets: ``lumina_scaling``.
Limit: n = 1 is ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gen.core.params import integer
from gen.core.registry import register
from gen.core.stats import Candidate
from gen.samplers.search.aggregations.base import (
    Aggregation,
    Ballot,
    read_aggregation,
)
from gen.samplers.search.aggregations.best import Best
from gen.samplers.search.base import Particles, Search, SearchSampler
from gen.samplers.search.progress import Progress


@register("sampler", "best_of")
@dataclass(frozen=True)
class BestOf(SearchSampler):
    """Draw ``n`` samples of ``base`` and return the one with the highest ``scorer``.

    ``n``: samples. ``aggregation``: rule that makes one answer of them, by name or with its
    parameters.
    """

    n: int = integer(4, least=1, each="row")
    aggregation: Any = "best"

    papers = ("2009.01325",)

    def __post_init__(self) -> None:
        super().__post_init__()
        read_aggregation(self.aggregation)

    @property
    def guarantee(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        is_best = isinstance(read_aggregation(self.aggregation), Best)
        return self.inner.guarantee if is_best or self.n == 1 else "approximate"

    @property
    def reference(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"the best of n samples of {self.inner.reference}"

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search = Search(self, target, rng)
        every = np.arange(target.items)
        outs, rounds = [], [every]
        size = self.n if search.budget is None else 1
        progress = Progress(callback, self.n // size)
        for first in range(0, self.n, size):
            items = rounds[-1]
            branches = np.tile(np.arange(first, first + size), (len(items), 1))
            particles = Particles(target, rng, draft, canvas, items, branches)
            out = self.inner(
                particles.target,
                particles.rng,
                draft=particles.draft,
                canvas=particles.canvas,
                trace=trace,
                callback=progress.next(particles.owners),
            )
            search.add_costs(particles.owners, out.stats)
            outs.append((particles.owners, out))
            rounds.append(items[search.has_budget()[items]])
            if not len(rounds[-1]):
                break
        return collect(search, outs, trace, read_aggregation(self.aggregation))


def collect(
    search: Search,
    outs: list,
    trace: bool,
    aggregation: Aggregation,
    weights: np.ndarray | None = None,
):
    """Score the outputs of all rounds and return the chosen one of each item.

    Args:
        search: what the call shares.
        outs: item of each output, int64 [n], and the outputs; of every round.
        trace: whether the outputs have traces.
        aggregation: rule that chooses.
        weights: samples that each output stands for, float64 [n]; None: one each.
    """
    owners = np.concatenate([o for o, _ in outs])
    tokens = torch.cat([out.tokens for _, out in outs])
    scores = search.scores(tokens, owners)
    answers = search.evaluator.answers(tokens, owners) if aggregation.reads_answers else []
    weights = np.ones(len(owners)) if weights is None else weights
    chosen, candidates = [], []
    for item in range(search.target.items):
        mine = (owners == item).nonzero()[0]
        said = [answers[i] for i in mine.tolist()] if answers else []
        ballot = Ballot(scores[mine], said, weights[mine])
        best, shares = int(mine[aggregation.choose(ballot)]), aggregation.shares(ballot)
        chosen.append(best)
        candidates.append(
            [
                Candidate(
                    tokens[i].cpu(),
                    float(scores[i]),
                    chosen=i == best,
                    weight=None if shares is None else float(shares[k]),
                )
                for k, i in enumerate(mine.tolist())
            ]
        )
    traces = None
    if trace:
        all_traces = [t for _, out in outs for t in out.traces]
        traces = [all_traces[i] for i in chosen]
    index = torch.tensor(chosen, device=tokens.device)
    return search.output(tokens[index], candidates, traces)
