"""A*-decoding: a best-first search over beginnings of the output.

    f(s) = g(s) + h(s)     g(s) = cost * (tokens of s),  h(s) = 1 - value(s)
    pop    the open beginning of lowest f; a finished one is the output
    expand k continuations of ``block`` tokens ~ p(. | s); they are open, s is not any more

A search goes on from any open beginning, however long ago it left it. At most ``width`` beginnings
are open: those of highest f are forgotten. Of equal f the longer one comes first, then the earlier
one. After ``expansions`` pops, or with the ``budget`` spent, the finished output of lowest f is
returned; where there is none, the best open beginning is decoded to its end.

The value of a beginning is that of ``value``, of a finished output the reward of ``scorer``, both
between 0 and 1. Open beginnings keep their caches: they are rows that wait, so nothing is computed
twice. The first continuation draws with its parent's noise, which is unused at its positions, the
others with that of new branches.

Reference: Chatziveroglou, "A*-Decoding: Token-Efficient Inference Scaling" (arXiv 2505.13672), with
h(s) = 1 - reward of the process.
Guarantee: approximate, relative to the base's output of highest reward.
Parameters: ``k``, ``block``, ``width``, ``value``, ``cost``, ``expansions``, ``budget``.
Preset: none; its name is the sampler's.
Limit: k = 1 is ``base``, whose windows end where blocks do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Scorer, read_scorer
from gen.core.params import integer, number
from gen.core.registry import register
from gen.core.stats import Candidate
from gen.samplers.engine.stepping import Estimate
from gen.samplers.search.base import Particles, Search, SearchSampler
from gen.samplers.search.resume import advance_some, require_causal


@register("sampler", "a_star")
@dataclass(frozen=True)
class AStar(SearchSampler):
    """Expand the most promising beginning of the output until a finished one is.

    ``k``: continuations per expansion. ``block``: their tokens. ``width``: open beginnings at most.
    ``expansions``: expansions of an item at most. ``cost``: price of a token. ``value``: scorer of
    beginnings, 0 to 1; None for ``scorer`` itself.
    """

    k: int = integer(4, least=1, each="row")
    block: int = integer(2, least=1)
    width: int = integer(8, least=1, each="row")
    expansions: int = integer(64, least=1)
    cost: float = number(0.0)
    value: Any = "process"

    papers = ("2505.13672",)
    reference = "the base's output of highest reward"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None:
            read_scorer(self.value, "sampler.value")

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search = Search(self, target, rng)
        size, parts = target.rows, []
        for first in range(0, target.items, size):
            items = np.arange(first, min(first + size, target.items))
            part = Expansion(self, search, items, draft, trace)
            part.decode(callback)
            parts.append(part)
        tokens = torch.cat([part.tokens() for part in parts])
        candidates = [found for part in parts for found in part.candidates]
        traces = [t for part in parts for t in part.traces()] if trace else None
        return search.output(tokens, candidates, traces)


@dataclass(order=True)
class Node:
    """Beginning of an item's output; nodes are ordered as they are popped.

    Attributes:
        f: cost so far and estimated cost to come.
        depth: minus its tokens.
        number: number among the item's beginnings, from 0 on.
        slot: particle that holds its state; None once it is finished.
        branch: branch of the item whose noise it draws with.
        level: expansions between the prompt and it.
        tokens: its tokens [T(, C)], of a finished one.
    """

    f: float
    depth: int
    number: int
    slot: int | None
    branch: int
    level: int
    tokens: Tensor | None = None
    trace: list | None = None


class Tree:
    """Beginnings of one item.

    Args:
        k: continuations per expansion.
        width: open beginnings at most.
    """

    def __init__(self, k: int, width: int):
        self.k, self.width = k, width
        self.open: list[Node] = []
        self.finished: list[Node] = []
        self.free = list(range(k + width))
        self.candidates: list[Candidate] = []
        self.next_branch, self.expansions = 1, 0
        self.output: Node | None = None

    def children(self, parent: Node | None) -> list[Node]:
        """Give the continuations of a beginning, or of the prompt (None), particles and branches.

        The first one has the parent's own.
        """
        if parent is not None and parent.slot is not None:
            self.free.insert(0, parent.slot)
        level = 0 if parent is None else parent.level + 1
        made = []
        for j in range(self.k):
            branch = (0 if parent is None else parent.branch) if not j else self.next_branch
            self.next_branch += j > 0
            made.append(Node(0.0, 0, -1, self.free.pop(0), branch, level))
        self.expansions += 1
        return made

    def add(self, node: Node) -> None:
        """Open a beginning, or note a finished output."""
        if node.tokens is None:
            heapq.heappush(self.open, node)
            return
        assert node.slot is not None, "a node that was just decoded has a particle"
        self.free.append(node.slot)
        node.slot = None
        self.finished.append(node)
        heapq.heappush(self.open, node)

    def narrow(self) -> None:
        """Forget the unfinished beginnings of highest f, so that ``width`` are left."""
        waiting = sorted(node for node in self.open if node.slot is not None)
        for node in waiting[self.width :]:
            assert node.slot is not None, "finished nodes are not among them"
            self.free.append(node.slot)
            self.open.remove(node)
        heapq.heapify(self.open)


class Expansion:
    """Search trees of some items, which share the passes of one run.

    Args:
        sampler: the search.
        search: what its calls share.
        items: the items, int64 [n].
        draft: target of the draft model, or of each.
        trace: whether to record every step.

    Attributes:
        particles: k + width of each item.
        candidates: what was looked at, for each item.
    """

    def __init__(self, sampler: AStar, search: Search, items: np.ndarray, draft: Any, trace: bool):
        self.sampler, self.search, self.items = sampler, search, items
        self.count = sampler.k + sampler.width
        branches = np.tile(np.arange(self.count), (len(items), 1))
        self.particles = Particles(search.target, search.rng, draft, None, items, branches, True)
        run = sampler.inner.begin(
            self.particles.target, self.particles.rng, draft=self.particles.draft, trace=trace
        )
        self.run = require_causal(run, "a_star", sampler.base["name"])
        self.value: Scorer = read_scorer(sampler.value or sampler.scorer, "sampler.value")
        self.trees = [Tree(sampler.k, sampler.width) for _ in items]
        self.ends: Tensor | None = None

    @property
    def candidates(self) -> list[list[Candidate]]:
        """What was looked at, for each item, level by level."""
        return [by_level(tree.candidates) for tree in self.trees]

    def decode(self, callback: Callable | None) -> None:
        """Expand beginnings, one of every item at a time, until every item has its output."""
        made = {i: (None, tree.children(None)) for i, tree in enumerate(self.trees)}
        slots = np.zeros((len(self.items), self.count), dtype=bool)
        slots[:, : self.sampler.k] = True
        self.run.drop(~slots.reshape(-1))  # the others go on from these
        number = 0
        while made:
            rows = np.zeros_like(slots)
            for i, (_, nodes) in made.items():
                for node in nodes:
                    rows[i, node.slot] = True
            advance_some(self.run, rows.reshape(-1), self.sampler.block)
            self.judge(made)
            number += 1
            self.report(callback, number)
            made = self.pop()
            self.fork(made)
        self.complete()
        stats = self.run.output().stats
        self.search.add_costs(self.particles.owners, stats)

    def judge(self, made: dict) -> None:
        """Score new beginnings and open them."""
        estimate = self.run.peek()
        entries = [(i, parent, node) for i, (parent, ns) in made.items() for node in ns]
        which = np.asarray([i * self.count + node.slot for i, _, node in entries])
        scores, length = self.scores(estimate, which), estimate.known.sum(1).cpu().numpy()
        tokens, known = estimate.tokens.cpu(), estimate.known.cpu()
        for (i, parent, node), row, score in zip(entries, which.tolist(), scores, strict=True):
            tree, done = self.trees[i], bool(known[row].all())
            node.number, node.depth = len(tree.candidates), -int(length[row])
            node.f = self.sampler.cost * int(length[row]) + 1 - float(score)
            before = None if parent is None else parent.number
            tree.candidates.append(
                Candidate(tokens[row], float(score), node.level, before, known=known[row])
            )
            if done:
                node.tokens = estimate.tokens[row]
                traces = self.run.recorder.traces
                node.trace = None if traces is None else list(traces[row])
            tree.add(node)
        for i in made:
            self.trees[i].narrow()

    def scores(self, estimate: Estimate, which: np.ndarray) -> np.ndarray:
        """Score particles (int64 [n]): beginnings by the value, finished ones by the reward."""
        done = estimate.known.all(1).cpu().numpy()[which]
        found = np.zeros(len(which))
        for scorer, some in ((self.value, ~done), (self.search.scorer, done)):
            if some.any():
                rows = torch.from_numpy(which[some]).to(estimate.tokens.device)
                owners = self.particles.owners[which[some]]
                found[some] = self.search.scores(
                    estimate.tokens[rows], owners, estimate.known[rows], scorer
                )
        return found

    def pop(self) -> dict:
        """Pop a beginning of every item without an output: item -> parent and its children."""
        within, made = self.has_budget(), {}
        for i, tree in enumerate(self.trees):
            if tree.output is not None:
                continue
            if within[i] and tree.expansions < self.sampler.expansions:
                best = heapq.heappop(tree.open)
                if best.tokens is None:
                    made[i] = best, tree.children(best)
                    continue
            else:
                best = min(tree.finished, default=min(tree.open))
            tree.output = best
        return made

    def has_budget(self) -> np.ndarray:
        """Find the items that have not spent their budget: bool [n]."""
        if self.search.budget is None:
            return np.ones(len(self.items), dtype=bool)
        stats = self.run.output().stats
        costs = [stats[i * self.count : (i + 1) * self.count] for i in range(len(self.items))]
        return self.search.affords(costs)

    def fork(self, made: dict) -> None:
        """Let the children go on from their parents."""
        every = len(self.items) * self.count
        ancestors, goes_on = np.arange(every), np.zeros(every, dtype=bool)
        branches = self.particles.branches.reshape(-1)
        for i, tree in enumerate(self.trees):
            first = i * self.count
            for node in tree.open:
                if node.slot is not None and tree.output in (None, node):
                    goes_on[first + node.slot] = True
            if tree.output is not None and tree.output.slot is not None:
                goes_on[first + tree.output.slot] = True
            parent, nodes = made.get(i, (None, []))
            for node in nodes:
                goes_on[first + node.slot] = True
                ancestors[first + node.slot] = first + parent.slot
                branches[first + node.slot] = node.branch
        if len(self.run.slots):
            self.run.take(ancestors, self.particles.rng)
            self.run.drop(~goes_on)

    def complete(self) -> None:
        """Decode outputs that are only begun to their ends."""
        while not self.run.is_over:
            self.run.step()
        estimate = self.run.peek()
        for i, tree in enumerate(self.trees):
            node = tree.output
            assert node is not None, "every item has an output by now"
            if node.tokens is None:
                row = i * self.count + int(node.slot or 0)
                node.tokens = estimate.tokens[row]
                traces = self.run.recorder.traces
                node.trace = None if traces is None else list(traces[row])
            number: int | None = node.number
            while number is not None:
                found = tree.candidates[number]
                tree.candidates[number] = replace(found, chosen=True)
                number = found.parent

    def report(self, callback: Callable | None, number: int) -> None:
        """Tell the callback how far the items are; no position counts as decided before the end."""
        if callback is None:
            return
        tokens = self.run.peek().tokens[:: self.count]
        done = sum(tree.output is not None for tree in self.trees)
        callback(
            {
                "step": number,
                "done": done,
                "total": len(self.trees),
                "tokens": tokens,
                "known": torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device),
            }
        )

    def tokens(self) -> Tensor:
        """Tokens of the outputs, [n, T(, C)]."""
        return torch.stack([tree.output.tokens for tree in self.trees])  # type: ignore[union-attr]

    def traces(self) -> list:
        """Traces of the outputs."""
        return [tree.output.trace for tree in self.trees]  # type: ignore[union-attr]


def by_level(candidates: list[Candidate]) -> list[Candidate]:
    """Sort candidates by level; parents are numbered among all, and then within their level."""
    order = sorted(range(len(candidates)), key=lambda n: candidates[n].level)
    number, seen = {}, {}
    for n in order:
        level = candidates[n].level
        number[n] = seen.get(level, 0)
        seen[level] = number[n] + 1
    parents = [candidates[n].parent for n in order]
    return [
        replace(candidates[n], parent=None if parent is None else number[parent])
        for n, parent in zip(order, parents, strict=True)
    ]
