"""Best of n: draw n samples, return the one with the highest score.

    x_1, ..., x_n ~ p,   out = x_k,  k = the first argmax of r(x_k)

    P(out = x) = p(x) (F(r)^n - F(r-)^n) / (F(r) - F(r-))     r = r(x), F the cdf of r under p,
                                                              F(r-) its limit from below

References: Stiennon et al., "Learning to summarize from human feedback" (arXiv 2009.01325); with a
rater of images, the inference-time scaling of Lumina-mGPT 2.0 (arXiv 2507.17801).
Guarantee: that of ``base``, relative to the best of n of the base's reference: the law above is
exact where the base is.
Parameters: ``n``, ``aggregation`` (``best``; ``majority``, ``weighted``: see ``aggregations``).
With a ``budget``, candidates are drawn one after the other until the item has spent it.
Presets: ``lumina_scaling``.
Limit: n = 1 is ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gen.core.params import integer
from gen.core.registry import register
from gen.core.stats import Candidate
from gen.samplers.search.base import Particles, Search, SearchSampler, reporting


@register("sampler", "best_of")
@dataclass(frozen=True)
class BestOf(SearchSampler):
    """Draw ``n`` samples of ``base`` and return the one with the highest ``scorer``."""

    n: int = integer(4, least=1)

    papers = ("2009.01325",)

    @property
    def guarantee(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.guarantee

    @property
    def reference(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"the best of n samples of {self.inner.reference}"

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search = Search(self, target, rng)
        every = np.arange(target.items)
        outs, rounds = [], [every]
        size = self.n if search.budget is None else 1
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
                callback=reporting(callback, target.items, size),
            )
            search.add_costs(particles.owners, out.stats)
            outs.append((particles.owners, out))
            rounds.append(items[search.has_budget()[items]])
            if not len(rounds[-1]):
                break
        return collect(search, outs, trace)


def collect(search: Search, outs: list, trace: bool):
    """Score the outputs of all rounds and return the best of each item."""
    owners = np.concatenate([o for o, _ in outs])
    tokens = torch.cat([out.tokens for _, out in outs])
    scores = search.scores(tokens, owners)
    chosen, candidates = [], []
    for item in range(search.target.items):
        mine = (owners == item).nonzero()[0]
        best = int(mine[scores[mine].argmax()])
        chosen.append(best)
        candidates.append(
            [Candidate(tokens[i], float(scores[i]), chosen=i == best) for i in mine.tolist()]
        )
    traces = None
    if trace:
        all_traces = [t for _, out in outs for t in out.traces]
        traces = [all_traces[i] for i in chosen]
    index = torch.tensor(chosen, device=tokens.device)
    return search.output(tokens[index], candidates, traces)
