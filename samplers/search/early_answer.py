"""Early answer: cheap samples first, the expensive ones only where those do not do.

    x_1, ..., x_n ~ base
    answered   max_j r(x_j) >= threshold, and the most frequent answer has a share >= agreement
    otherwise  x_{n+1}, ..., x_{n+more} ~ then;   out = aggregation of all

Reference: Li et al., "EconProver: Towards More Economical Test-Time Scaling for Automated Theorem
Proving" (arXiv 2509.12603), whose prover tries without a chain of thought first. Theirs is trained
to switch; here a scorer or the agreement of samples decides.
Guarantee: approximate, relative to ``then``.
Parameters: ``n``, ``then`` (a sampler of the same model, such as a search with many samples or
``base`` with more steps; None: ``base``), ``more``, ``threshold`` (None: every score does),
``agreement``, ``aggregation``, ``budget``: an item that has spent it gets no expensive samples.
Preset: none; its name is the sampler's.
Limit: n = 1 without threshold and agreement is ``base``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gen.core.errors import GenError
from gen.core.params import integer, number, param
from gen.core.registry import register
from gen.core.resolve import resolve_sampler, spell
from gen.core.sampler import Sampler
from gen.samplers.search.aggregations.base import read_aggregation
from gen.samplers.search.base import Search, SearchSampler
from gen.samplers.search.best_of import collect
from gen.samplers.search.progress import Progress
from gen.samplers.search.rounds import draw


@register("sampler", "early_answer")
@dataclass(frozen=True)
class EarlyAnswer(SearchSampler):
    """Run ``then`` only where ``n`` samples of ``base`` fail the scorer or disagree.

    ``n``: cheap samples. ``then``: sampler of the expensive ones; None for ``base``. ``more``:
    expensive samples. ``threshold``: score with which an item is answered. ``agreement``: share of
    its cheap samples that must agree. ``aggregation``: rule that makes one answer of all.
    """

    n: int = integer(1, least=1, each="row")
    then: Any = None
    more: int = integer(4, least=1, each="row")
    threshold: float | None = param(1.0, float, also=(None,))
    agreement: float = number(0.0, most=1.0)
    aggregation: Any = "best"

    papers = ("2509.12603",)
    reference = "the expensive sampler"

    def __post_init__(self) -> None:
        if self.then is not None:
            resolve_sampler(self.then, where="sampler.then")  # a bad one fails here
            object.__setattr__(self, "then", spell(self.then))
        super().__post_init__()
        read_aggregation(self.aggregation)
        name = "" if self.then is None else self.then["name"]
        if self.second.protocol != self.inner.protocol:
            raise GenError(
                f"sampler.then {name!r} decodes {self.second.protocol} models and"
                f" sampler.base {self.base['name']!r} {self.inner.protocol} ones; expected samplers"
                " of the same model"
            )
        if self.second.drafted and self.second.draft_names != self.inner.draft_names:
            raise GenError(
                f"sampler.then {name!r} needs the draft models"
                f" {self.second.draft_names}, and sampler.base has {self.inner.draft_names};"
                " expected the same ones"
            )

    @cached_property
    def second(self) -> Sampler:
        """Sampler of the expensive samples."""
        if self.then is None:
            return self.inner
        return resolve_sampler(self.then, where="sampler.then")[0]

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search, progress = Search(self, target, rng), Progress(callback, 2)
        every = np.arange(target.items)
        branches = np.tile(np.arange(self.n), (len(every), 1))
        more = {"canvas": canvas, "trace": trace}
        told = progress.watch(self.inner, np.repeat(every, self.n))
        outs = [draw(search, told, every, branches, draft=draft, **more)]
        left = every[~self.answered(search, *outs[0]) & search.has_budget()]
        if len(left):
            branches = np.tile(np.arange(self.n, self.n + self.more), (len(left), 1))
            draft = draft if self.second.drafted else None
            told = progress.watch(self.second, np.repeat(left, self.more))
            outs.append(draw(search, told, left, branches, draft=draft, **more))
        return collect(search, outs, trace, read_aggregation(self.aggregation))

    def answered(self, search: Search, owners: np.ndarray, out: Any) -> np.ndarray:
        """Find the items whose cheap samples do: bool [N]."""
        done = np.ones(search.target.items, dtype=bool)
        if self.threshold is not None:
            scores = search.scores(out.tokens, owners).reshape(-1, self.n)
            done &= scores.max(1) >= self.threshold
        if self.agreement:
            answers = search.evaluator.answers(out.tokens, owners)
            for item in range(len(done)):
                said = Counter(answers[item * self.n : (item + 1) * self.n])
                done[item] &= max(said.values()) >= self.agreement * self.n
        return done
