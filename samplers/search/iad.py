"""Iterative agent decoding: every round starts from the best output so far.

    round 0     x_1, ..., x_n ~ base;                       best = the first argmax of r
    round t     x_1, ..., x_n ~ base( . | a part of best);  best = the first argmax of r so far

    masked base    the part is ``keep`` of the positions; the others are masked again
                     feedback random   which ones, the noise of (item, candidate) says
                     feedback credit   those of highest credit: mean score of the candidates so far
                                       that have best's token there, minus that of the others
    causal base    the part is a beginning: the longest multiple of ``block`` that ``value`` gives
                   at least ``approve``, and at most ``keep`` of the output

An item whose best reaches ``threshold`` is done. Without conditioning (keep = 0) this is best of n
times as many samples.

Reference: Chakraborty et al., "Review, Refine, Repeat: Understanding Iterative Decoding of AI
Agents with Dynamic Evaluation and Selection" (arXiv 2504.01931), where a language model reads the
best output and the verifier's words; here the canvas or the prefix holds the former, and scores are
the latter.
Guarantee: approximate, relative to the base's output of highest reward.
Parameters: ``n``, ``rounds``, ``keep``, ``feedback``, ``value``, ``approve``, ``block``,
``threshold``, ``budget``.
Preset: none; its name is the sampler's.
Limit: rounds = 1 is ``best_of``, and n = 1 then ``base``; keep = 0 is ``best_of`` with n rounds
samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import read_scorer
from gen.core.params import choice, integer, number, param
from gen.core.registry import register
from gen.core.stats import Candidate, SampleOutput, TraceStep
from gen.samplers.search.base import Particles, Search, SearchSampler, num_tokens
from gen.samplers.search.progress import Progress
from gen.samplers.search.resume import load, require_causal
from gen.samplers.search.rounds import draw

Made = tuple[np.ndarray, SampleOutput]  # item of each candidate, and their output


@register("sampler", "iad")
@dataclass(frozen=True)
class IAD(SearchSampler):
    """Draw ``n`` candidates per round, each round from a part of the best one so far.

    ``rounds``: rounds. ``keep``: share of the best output that a round starts from, at most.
    ``feedback``: positions that a masked base keeps. ``value``, ``approve``, ``block``: of a causal
    one, scorer of beginnings (None: all do), its least score, and the step between beginnings.
    ``threshold``: score with which an item is done; None for no such score.
    """

    n: int = integer(2, least=1, each="row")
    rounds: int = integer(4, least=1, each="step")
    keep: float = number(0.5, most=1.0)
    feedback: str = choice("credit", ("random", "credit"))
    value: Any = None
    approve: float = number(1.0)
    block: int = integer(1, least=1)
    threshold: float | None = param(None, float, also=(None,))

    papers = ("2504.01931",)
    reference = "the base's output of highest reward"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None:
            read_scorer(self.value, "sampler.value")

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search, progress = Search(self, target, rng), Progress(callback, self.rounds)
        memory = Memory(self, search, canvas, trace)
        items = np.arange(target.items)
        for number_of_round in range(self.rounds):
            first = number_of_round * self.n
            branches = np.tile(np.arange(first, first + self.n), (len(items), 1))
            if not number_of_round or not self.keep:
                told = progress.watch(self.inner, np.repeat(items, self.n))
                made = draw(search, told, items, branches, draft=draft, canvas=canvas, trace=trace)
            elif self.protocol == "causal":
                made = self.go_on(search, progress, memory, items, branches, draft, trace)
            else:
                made = self.refill(search, progress, memory, items, branches, draft, trace)
            memory.add(number_of_round, *made)
            items = items[memory.goes_on()[items]]
            if not len(items):
                break
        return memory.output()

    def refill(self, search, progress, memory, items, branches, draft, trace) -> Made:
        """Decode canvases that hold a part of the best outputs."""
        best = memory.tokens
        made = Particles(search.target, search.rng, draft, None, items, branches)
        space = search.target.space
        length = best.shape[1]
        rows = torch.arange(len(made.owners), device=best.device)
        positions = torch.arange(length, device=best.device).expand(len(rows), -1)
        order = made.rng.uniform(rows, positions, "remask", None).cpu().numpy()
        free = np.ones(order.shape, dtype=bool)  # positions that may be masked again
        if memory.canvas is not None:
            free = space.is_masked(memory.canvas).cpu().numpy()[made.owners]
        credit = np.zeros(order.shape)
        if self.feedback == "credit" and not space.channels:
            credit = memory.credit()[made.owners]
        # lowest credit first, and among equal ones in random order
        rank = np.lexsort((order, np.where(free, credit, np.inf)), axis=1)
        masked = np.zeros(order.shape, dtype=bool)
        count = free.sum(1) - np.floor(self.keep * free.sum(1)).astype(np.int64)
        np.put_along_axis(masked, rank, np.arange(length) < count[:, None], 1)
        again = torch.from_numpy(masked).to(best.device)
        begun = space.empty(len(rows), best.device)
        shape = (*again.shape, *[1] * (best.ndim - 2))
        owners = torch.from_numpy(made.owners).to(best.device)
        begun = torch.where(again.view(shape), begun, best[owners])
        told = progress.watch(self.inner, made.owners)
        out = told(made.target, made.rng, draft=made.draft, canvas=begun, trace=trace)
        search.add_costs(made.owners, out.stats)
        return made.owners, out

    def go_on(self, search, progress, memory, items, branches, draft, trace) -> Made:
        """Go on behind beginnings of the best outputs."""
        made = Particles(search.target, search.rng, draft, None, items, branches)
        run = require_causal(
            self.inner.begin(made.target, made.rng, draft=made.draft, trace=trace),
            "iad",
            self.base["name"],
        )
        lengths = self.beginnings(search, memory, items)
        owners = torch.from_numpy(made.owners).to(memory.tokens.device)
        load(run, memory.tokens[owners], np.repeat(lengths, self.n))
        report = progress.next(made.owners)
        while not run.is_over:
            run.step()
            run.report(report)
        out = run.output()
        search.add_costs(made.owners, out.stats)
        return made.owners, out

    def beginnings(self, search, memory, items) -> np.ndarray:
        """Return how many tokens of each item's best output are kept, int64 [n]."""
        best = memory.tokens[torch.from_numpy(items).to(memory.tokens.device)]
        most = np.floor(self.keep * np.asarray(num_tokens(best, search.target))).astype(np.int64)
        most = np.minimum(most, best.shape[1] - 1)
        if self.value is None:
            return most
        scorer = read_scorer(self.value, "sampler.value")
        kept = np.zeros(len(items), dtype=np.int64)
        for length in range(self.block, int(most.max(initial=0)) + 1, self.block):
            some = (length <= most).nonzero()[0]
            rows = torch.from_numpy(some).to(best.device)
            known = torch.zeros(len(some), best.shape[1], dtype=torch.bool, device=best.device)
            known[:, :length] = True
            scores = search.scores(best[rows], items[some], known, scorer)
            kept[some[scores >= self.approve]] = length
        return kept


class Memory:
    """Candidates of all rounds, and the best of each item.

    Args:
        sampler: the search.
        search: what the call shares.
        canvas: canvas of all items or None.
        trace: whether outputs have traces.

    Attributes:
        tokens: tokens of the best outputs, [N, T(, C)].
        best: their scores, float64 [N].
    """

    tokens: Tensor

    def __init__(self, sampler: IAD, search: Search, canvas: Tensor | None, trace: bool):
        self.sampler, self.search, self.canvas, self.trace = sampler, search, canvas, trace
        count = search.target.items
        self.best = np.full(count, -np.inf)
        self.chosen = np.zeros(count, dtype=np.int64)
        self.candidates: list[list[Candidate]] = [[] for _ in range(count)]
        self.traces: list[Any] = [None] * count

    def add(self, level: int, owners: np.ndarray, out: SampleOutput) -> None:
        """Score the candidates of a round."""
        scores = self.search.scores(out.tokens, owners)
        if not level:
            self.tokens = out.tokens[:: self.sampler.n].clone()
        before = [self._parent(item, level) for item in range(len(self.candidates))]
        for row, (item, score) in enumerate(zip(owners.tolist(), scores.tolist(), strict=True)):
            number, found = len(self.candidates[item]), self.candidates[item]
            found.append(Candidate(out.tokens[row].cpu(), score, level, before[item]))
            if score > self.best[item]:
                self.best[item], self.chosen[item] = score, number
                self.tokens[item] = out.tokens[row]
                if out.traces is not None:
                    self.traces[item] = self._whole_trace(item, out.traces[row])

    def _parent(self, item: int, level: int) -> int | None:
        """Return the number of an item's best candidate within the level before, if it is there."""
        found = self.candidates[item]
        if not self.sampler.keep or not found:
            return None
        best = int(self.chosen[item])
        return best % self.sampler.n if found[best].level == level - 1 else None

    def _whole_trace(self, item: int, steps: list[TraceStep]) -> list[TraceStep]:
        """Put a step before a trace that commits what the round began with."""
        tokens = self.tokens[item]
        wanted = torch.ones(len(tokens), dtype=torch.bool)
        if self.canvas is not None:
            wanted = self.search.target.space.is_masked(self.canvas[item]).cpu()
        said = {position for step in steps for position in step.committed}
        kept = [n for n in wanted.nonzero()[:, 0].tolist() if n not in said]
        if not kept:
            return steps
        return [TraceStep(kept, [], {n: tokens[n].tolist() for n in kept}), *steps]

    def goes_on(self) -> np.ndarray:
        """Find the items that are not done: bool [N]."""
        within = self.search.has_budget()
        if self.sampler.threshold is None:
            return within
        return within & (self.best < self.sampler.threshold)

    def credit(self) -> np.ndarray:
        """Estimate what each token of the best outputs is worth, float64 [N, T].

        It is 0 where all candidates have the same token.
        """
        found = []
        for item, some in enumerate(self.candidates):
            tokens = np.stack([c.tokens.numpy() for c in some])
            scores = np.asarray([c.score for c in some], dtype=np.float64)[:, None]
            same = tokens == self.tokens[item].cpu().numpy()
            differs = ~same
            with_it = (scores * same).sum(0) / np.maximum(same.sum(0), 1)
            without = (scores * differs).sum(0) / np.maximum(differs.sum(0), 1)
            found.append(np.where(differs.any(0), with_it - without, 0.0))
        return np.stack(found)

    def output(self) -> SampleOutput:
        """Return the best output of every item."""
        for some, best in zip(self.candidates, self.chosen.tolist(), strict=True):
            some[best] = replace(some[best], chosen=True)
        return self.search.output(self.tokens, self.candidates, self.traces if self.trace else None)
