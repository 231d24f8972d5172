"""DeepPrune: parallel samples of which those that will say the same are stopped early.

    every ``block``   the samples that go on form clusters, greedily in their order: one joins the
                      first cluster of whose first member the judge says that both will end alike,
                      with probability >= ``threshold``; otherwise it founds a cluster
    of a cluster      the first ``keep`` members go on, each with weight w(cluster) / (members kept)
    in the end        the answer of the highest total weight (``aggregation``)

Two samples with the same beginning need not end alike: the probability that they do is what a judge
estimates. The judge ``prefix`` merges all that are equal so far, however much is to come, so that
``start`` bounds the loss: nothing is judged before so many blocks. ``keep`` above 1 leaves a large
cluster several votes.

Reference: Tu et al., "DeepPrune: Parallel Scaling without Inter-trace Redundancy" (arXiv
2510.08483): a fine-tuned language model judges traces there, one member of each cluster goes on.
Guarantee: approximate, relative to the majority of n samples of the base.
Parameters: ``n``, ``block``, ``start``, ``keep``, ``judge``, ``threshold``, ``aggregation``,
``budget``.
Preset: none; its name is the sampler's.
Limit: n = 1 is ``base``; keep = n is ``best_of`` with the same aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gen.core.params import integer, number
from gen.core.registry import register
from gen.core.stats import Candidate
from gen.samplers.engine.stepping import SteppableRun
from gen.samplers.search.aggregations.base import Ballot, read_aggregation
from gen.samplers.search.base import Particles, Search, SearchSampler
from gen.samplers.search.judges import Judge, read_judge


@register("sampler", "deepprune")
@dataclass(frozen=True)
class DeepPrune(SearchSampler):
    """Vote among ``n`` samples, and stop those that a judge expects to end like another one.

    ``block``: forward passes of a masked base, or positions of a causal one, between judgements.
    ``start``: blocks before the first one. ``keep``: members of a cluster that go on. ``judge``:
    ``prefix``, or the name or folder of a trained judge. ``threshold``: least probability of a
    merge. ``aggregation``: rule of the vote.
    """

    n: int = integer(16, least=1, each="row")
    block: int = integer(1, least=1)
    start: int = integer(2, least=1)
    keep: int = integer(1, least=1)
    judge: Any = "prefix"
    threshold: float = number(0.5, most=1.0)
    aggregation: Any = "majority"

    papers = ("2510.08483",)
    reference = "the majority of n samples of the base"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_aggregation(self.aggregation)
        read_judge(self.judge)

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        search = Search(self, target, rng)
        size, parts = target.rows, []
        for first in range(0, target.items, size):
            items = np.arange(first, min(first + size, target.items))
            part = Pruned(self, search, items, draft, canvas, trace)
            part.decode(callback)
            part.vote()
            parts.append(part)
        tokens = torch.cat([part.out.tokens[part.index()] for part in parts])
        candidates = [found for part in parts for found in part.candidates]
        traces = [t for part in parts for t in part.traces()] if trace else None
        return search.output(tokens, candidates, traces)


class Pruned:
    """Samples of some items on their way.

    Args:
        sampler: the search.
        search: what its calls share.
        items: the items, int64 [m].
        draft: target of the draft model, or of each.
        canvas: canvas of all items or None.
        trace: whether to record every step.

    Attributes:
        weights: samples that each one stands for, float64 [m, n]; 0 for one that was stopped.
        joined: sample in whose favour each one was stopped, int64 [m, n]; itself where it was not.
        decided: positions that each sample had decided when it was stopped, bool [m n, T].
    """

    def __init__(self, sampler: DeepPrune, search: Search, items, draft, canvas, trace: bool):
        self.sampler, self.search, self.items = sampler, search, items
        branches = np.tile(np.arange(sampler.n), (len(items), 1))
        self.particles = Particles(search.target, search.rng, draft, canvas, items, branches, True)
        self.run: SteppableRun = sampler.inner.begin(
            self.particles.target,
            self.particles.rng,
            draft=self.particles.draft,
            canvas=self.particles.canvas,
            trace=trace,
        )
        self.judge: Judge = read_judge(sampler.judge)
        self.weights = np.ones(branches.shape)
        self.joined, self.chosen = branches.copy(), np.zeros(len(items), dtype=np.int64)
        self.candidates: list[list[Candidate]] = [[] for _ in items]
        shape = branches.size, self.particles.target.length
        self.decided = torch.ones(shape, dtype=torch.bool)

    def decode(self, callback) -> None:
        """Decode all samples block by block, and stop those that are not needed."""
        level = 0
        while not self.run.is_over:
            self.run.advance(self.sampler.block)
            level += 1
            if level >= self.sampler.start and not self.run.is_over:
                self.prune()
            if callback is not None:
                self.report(callback, level)
        self.out = self.run.output()
        self.search.add_costs(self.particles.owners, self.out.stats)

    def prune(self) -> None:
        """Cluster the samples of every item that go on, and stop the others of each cluster."""
        estimate, shape = self.run.peek(), self.weights.shape
        tokens = estimate.tokens.cpu().numpy().reshape(*shape, *estimate.tokens.shape[1:])
        known = estimate.known.cpu().numpy().reshape(*shape, -1)
        goes_on = ~known.all(2) & (self.weights > 0)
        within = self.has_budget()
        for i in range(len(self.items)):
            alive = goes_on[i].nonzero()[0].tolist()
            if not within[i]:
                self.end(i, alive, known[i])
                continue
            for members in self.clusters(tokens[i], known[i], alive):
                self.merge(i, members)
        # what a stopped sample has decided is known no more once it is dropped
        stopped = self.weights == 0
        fresh = torch.from_numpy((stopped & goes_on).reshape(-1))
        self.decided[fresh] = estimate.known.cpu()[fresh]
        self.run.drop(stopped.reshape(-1))

    def clusters(self, tokens: np.ndarray, known: np.ndarray, alive: list[int]) -> list[list[int]]:
        """Group samples greedily: each joins the first group whose first member it will equal."""
        found: list[list[int]] = []
        for sample in alive:
            for group in found:
                same = self.judge.probability(tokens, known, group[0], sample)
                if same >= self.sampler.threshold:
                    group.append(sample)
                    break
            else:
                found.append([sample])
        return found

    def merge(self, item: int, members: list[int]) -> None:
        """Stop all but the first members of a cluster, which share its weight."""
        kept, left = members[: self.sampler.keep], members[self.sampler.keep :]
        if not left:
            return
        self.weights[item, kept] = self.weights[item, members].sum() / len(kept)
        self.weights[item, left] = 0
        self.joined[item, left] = kept[0]

    def end(self, item: int, alive: list[int], known: np.ndarray) -> None:
        """Stop the samples of an item whose budget is spent; one goes on if none is finished."""
        kept = []
        if not (known.all(1) & (self.weights[item] > 0)).any():
            kept = [max(alive, key=lambda sample: (self.weights[item, sample], -sample))]
        self.weights[item, [sample for sample in alive if sample not in kept]] = 0

    def has_budget(self) -> np.ndarray:
        """Find the items that have not spent their budget: bool [m]."""
        if self.search.budget is None:
            return np.ones(len(self.items), dtype=bool)
        stats, n = self.run.output().stats, self.sampler.n
        return self.search.affords([stats[i * n : (i + 1) * n] for i in range(len(self.items))])

    def vote(self) -> None:
        """Choose the answer of every item."""
        rule, n = read_aggregation(self.sampler.aggregation), self.sampler.n
        voters = (self.weights > 0).reshape(-1).nonzero()[0]
        rows = torch.from_numpy(voters).to(self.out.tokens.device)
        tokens, owners = self.out.tokens[rows], self.particles.owners[voters]
        scores = self.search.scores(tokens, owners)
        answers = self.search.evaluator.answers(tokens, owners) if rule.reads_answers else []
        for i in range(len(self.items)):
            mine = (voters // n == i).nonzero()[0]
            said = [answers[k] for k in mine.tolist()] if answers else []
            ballot = Ballot(scores[mine], said, self.weights[i, voters[mine] % n])
            self.chosen[i] = voters[mine[rule.choose(ballot)]] % n
            score = dict(zip((voters[mine] % n).tolist(), scores[mine].tolist(), strict=True))
            self.candidates[i] = self.noted(i, score)

    def noted(self, item: int, score: dict[int, float]) -> list[Candidate]:
        """Return the samples of an item; one that was stopped has no score."""
        n, found = self.sampler.n, []
        for j in range(n):
            row = item * n + j
            stopped = j not in score
            found.append(
                Candidate(
                    self.out.tokens[row].cpu(),
                    score.get(j),
                    chosen=j == self.chosen[item],
                    known=self.decided[row] if stopped else None,
                    weight=float(self.weights[item, j]) / n,
                    label=f"like {self.joined[item, j]}" if stopped else "",
                )
            )
        return found

    def report(self, callback, number: int) -> None:
        """Tell the callback how far the samples are; none is chosen before the vote."""
        estimate = self.run.peek()
        known = estimate.known[:: self.sampler.n]
        callback(
            {
                "step": number,
                "done": int(known.sum()),
                "total": known.numel(),
                "tokens": estimate.tokens[:: self.sampler.n],
                "known": torch.zeros_like(known),
            }
        )

    def index(self) -> torch.Tensor:
        """Rows of the chosen samples, long [m]."""
        rows = np.arange(len(self.items)) * self.sampler.n + self.chosen
        return torch.from_numpy(rows).to(self.out.tokens.device)

    def traces(self) -> list:
        """Traces of the chosen samples."""
        assert self.out.traces is not None, "asked for with a trace alone"
        return [self.out.traces[row] for row in self.index().tolist()]
