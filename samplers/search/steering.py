"""Steering: particles of an item that advance side by side, and a rule that decides between them.

    level s     every particle advances by a block; peek gives estimates x_1, ..., x_P of the output
    score       v_j = value of x_j, of a finished particle its reward r(x_j)
    decide      the rule says from whose state each particle goes on: index [n, P]
    finish      once nothing is left to decode, the rule chooses a particle of each item

``block`` is counted in forward passes of a masked base and in positions of a causal one. A block of
the tokens of one frame decides frame by frame. An item whose particles are all finished decides one
last time and is over. Decisions are keyed by (item, level), so an item's result is the same alone
and in a batch.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Scorer, read_scorer
from gen.core.params import integer
from gen.core.stats import Candidate
from gen.samplers.engine.stepping import Estimate, SteppableRun
from gen.samplers.search.base import Particles, Search, SearchSampler


@dataclass(frozen=True)
class Level:
    """Particles of n items at a decision.

    Attributes:
        number: number of the level, from 0 on.
        items: the items, int64 [n].
        scores: value of each particle, float64 [n, P].
        done: particles that are finished, bool [n, P].
    """

    number: int
    items: np.ndarray
    scores: np.ndarray
    done: np.ndarray

    @property
    def is_last(self) -> np.ndarray:
        """Items whose particles are all finished, bool [n]."""
        return np.asarray(self.done.all(1))


class Rule(ABC):
    """Rule of a steering method for one call.

    Args:
        search: the search, which draws decisions.
        items: number of items N of the call.
        count: particles of each item, P.
    """

    def __init__(self, search: Search, items: int, count: int):
        self.search, self.count = search, count

    @property
    def decides(self) -> bool:
        """Tell whether there is a choice between particles; else they run to their end at once."""
        return self.count > 1

    @abstractmethod
    def decide(self, level: Level) -> np.ndarray:
        """Return from whose state each particle goes on: int64 [n, P]."""

    @abstractmethod
    def finish(self, items: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the chosen particle of each item, int64 [n].

        Args:
            items: the items, int64 [n].
            scores: reward of each particle after its last decision, float64 [n, P].
        """

    def weights(self, item: int) -> np.ndarray | None:
        """Return the weights of an item's particles at its last decision, float64 [P], or None.

        They are those before particles went on from others.
        """
        return None

    def label(self, item: int) -> str:
        """Return words about an item's output, after ``finish``."""
        return ""


@dataclass(frozen=True)
class SteeringSampler(SearchSampler):
    """Search that decides between particles while they are decoded.

    ``block``: forward passes of a masked base, or positions of a causal one, between two decisions.
    ``value``: scorer of unfinished particles; None for ``scorer`` itself, on the estimate of the
    output.
    """

    block: int = integer(1, least=1)
    value: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None:
            read_scorer(self.value, "sampler.value")

    @property
    @abstractmethod
    def num_particles(self) -> int:
        """Particles of each item, P."""

    @abstractmethod
    def rule(self, search: Search, items: int) -> Rule:
        """Make the rule of one call about N items."""

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search = Search(self, target, rng)
        rule = self.rule(search, target.items)
        size, parts = target.rows, []
        for first in range(0, target.items, size):
            items = np.arange(first, min(first + size, target.items))
            steered = Steered(self, search, rule, items, draft, canvas, trace)
            steered.decode(callback)
            parts.append(steered)
        tokens = torch.cat([part.tokens() for part in parts])
        candidates = [found for part in parts for found in part.candidates]
        traces = [t for part in parts for t in part.traces()] if trace else None
        return search.output(tokens, candidates, traces)


class Steered:
    """Particles of some items on their way.

    Args:
        sampler: the search.
        search: what its calls share.
        rule: the rule.
        items: the items, int64 [n].
        draft: target of the draft model, or of each.
        canvas: canvas of all items or None.
        trace: whether to record every step.

    Attributes:
        run: run of the base sampler.
        scores: newest score of every particle, float64 [n, P].
        candidates: what was looked at, for each item.
    """

    def __init__(
        self,
        sampler: SteeringSampler,
        search: Search,
        rule: Rule,
        items: np.ndarray,
        draft: Any,
        canvas: Tensor | None,
        trace: bool,
    ):
        self.sampler, self.search, self.rule, self.items = sampler, search, rule, items
        self.count = sampler.num_particles
        branches = np.tile(np.arange(self.count), (len(items), 1))
        self.particles = Particles(
            search.target, search.rng, draft, canvas, items, branches, stepped=True
        )
        self.next_branch = np.full(len(items), self.count)
        self.run: SteppableRun = sampler.inner.begin(
            self.particles.target,
            self.particles.rng,
            draft=self.particles.draft,
            canvas=self.particles.canvas,
            trace=trace,
        )
        self.value: Scorer = read_scorer(sampler.value or sampler.scorer, "sampler.value")
        self.scores = np.zeros((len(items), self.count))
        # finished particles whose score is their reward, bool [n, P]
        self.rewarded = np.zeros((len(items), self.count), dtype=bool)
        # particle that an item without budget goes on with, -1 where it has some, int64 [n]
        self.alone = np.full(len(items), -1)
        self.candidates: list[list[Candidate]] = [[] for _ in items]
        # number of each particle's candidate of the level before, int64 [n, P]
        self.before: np.ndarray | None = None

    def decode(self, callback: Callable | None) -> None:
        """Decode all particles, level by level."""
        goes_on = np.ones(len(self.items), dtype=bool)
        number = 0
        # a window that stopped at a block's end would draw other tokens than the base
        block = self.sampler.block if self.rule.decides else sys.maxsize
        while goes_on.any():
            self.run.advance(block)
            estimate = self.run.peek()
            done = np.ones(self.scores.size, dtype=bool)
            done[self.run.slots.items] = False
            done = done.reshape(self.scores.shape)
            self.score(estimate, goes_on, done)
            level = Level(number, self.items[goes_on], self.scores[goes_on], done[goes_on])
            index = np.tile(np.arange(self.count), (len(self.items), 1))
            index[goes_on] = self.rule.decide(level)
            self.note(estimate, goes_on, number)
            self.take(index)
            goes_on &= ~done.all(1)
            goes_on &= ~self.settle(goes_on)
            number += 1
            self.report(callback, estimate, number)
        while not self.run.is_over:
            self.run.advance(block)
        out = self.run.output()
        self.search.add_costs(self.particles.owners, out.stats)
        chosen = self.rule.finish(self.items, self.scores)
        self.out, self.chosen = out, np.where(self.alone < 0, chosen, self.alone)
        self.mark()

    def settle(self, goes_on: np.ndarray) -> np.ndarray:
        """Leave items that have spent their budget the particle of highest score alone.

        Args:
            goes_on: items that are still decided about, bool [n].

        Returns:
            Items that spent it now, bool [n].
        """
        if self.search.budget is None or not goes_on.any():
            return np.zeros_like(goes_on)
        stats, count = self.run.output().stats, self.count
        costs = [stats[i * count : (i + 1) * count] for i in range(len(self.items))]
        spent = goes_on & ~self.search.affords(costs)
        best = self.scores.argmax(1)
        self.alone = np.where(spent, best, self.alone)
        others = spent[:, None] & (np.arange(count) != best[:, None])
        if others.any():
            self.run.drop(others.reshape(-1))
        return spent

    def score(self, estimate: Estimate, goes_on: np.ndarray, done: np.ndarray) -> None:
        """Score the particles of items that go on: a finished one by the reward."""
        goes_on = goes_on[:, None]
        for scorer, some in (
            (self.value, goes_on & ~done),
            (self.search.scorer, goes_on & done & ~self.rewarded),
        ):
            which = some.reshape(-1).nonzero()[0]
            if len(which):
                rows = torch.from_numpy(which).to(estimate.tokens.device)
                self.scores.reshape(-1)[which] = self.search.scores(
                    estimate.tokens[rows],
                    self.particles.owners[which],
                    estimate.known[rows],
                    scorer,
                )
        self.rewarded |= goes_on & done

    def take(self, index: np.ndarray) -> None:
        """Let particles go on from others; a copy gets noise of its own."""
        moved = index != np.arange(self.count)
        if not moved.any():
            return
        branches = self.particles.branches.reshape(index.shape)
        for item, particle in zip(*moved.nonzero(), strict=True):
            branches[item, particle] = self.next_branch[item]
            self.next_branch[item] += 1
        first = np.arange(len(self.items))[:, None] * self.count
        self.run.take((first + index).reshape(-1), self.particles.rng)
        self.scores = np.take_along_axis(self.scores, index, 1)
        self.rewarded = np.take_along_axis(self.rewarded, index, 1)
        if self.before is not None:
            self.before = np.take_along_axis(self.before, index, 1)

    def note(self, estimate: Estimate, goes_on: np.ndarray, number: int) -> None:
        """Note the particles of a level as candidates."""
        before = self.before
        every = np.tile(np.arange(self.count), (len(self.items), 1))
        self.before = every if before is None else np.where(goes_on[:, None], every, before)
        tokens, known = estimate.tokens.cpu(), estimate.known.cpu()
        for item in goes_on.nonzero()[0].tolist():
            weights = self.rule.weights(int(self.items[item]))
            for j in range(self.count):
                row = item * self.count + j
                self.candidates[item].append(
                    Candidate(
                        tokens[row],
                        float(self.scores[item, j]),
                        number,
                        None if before is None else int(before[item, j]),
                        known=known[row],
                        weight=None if weights is None else float(weights[j]),
                    )
                )

    def mark(self) -> None:
        """Mark the candidates that the outputs came of, level by level."""
        assert self.before is not None, "there is a level at least"
        for item, found in enumerate(self.candidates):
            number: int | None = int(self.before[item, self.chosen[item]])
            label = self.rule.label(int(self.items[item]))
            for first in range(len(found) - self.count, -1, -self.count):
                assert number is not None, "only those of level 0 have no parent"
                candidate = found[first + number]
                found[first + number] = replace(candidate, chosen=True, label=label)
                number, label = candidate.parent, ""

    def report(self, callback: Callable | None, estimate: Estimate, number: int) -> None:
        """Tell the callback how far the particles are."""
        if callback is None:
            return
        known = estimate.known[:: self.count]
        callback(
            {
                "step": number,
                "done": int(known.sum()),
                "total": known.numel(),
                "tokens": estimate.tokens[:: self.count],
                "known": torch.zeros_like(known),
            }
        )

    def tokens(self) -> Tensor:
        """Tokens of the chosen particles, [n, T(, C)]."""
        rows = np.arange(len(self.items)) * self.count + self.chosen
        return self.out.tokens[torch.from_numpy(rows).to(self.out.tokens.device)]

    def traces(self) -> list:
        """Traces of the chosen particles."""
        assert self.out.traces is not None, "asked for with a trace alone"
        rows = np.arange(len(self.items)) * self.count + self.chosen
        return [self.out.traces[row] for row in rows.tolist()]
