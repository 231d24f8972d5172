"""Base of searches: samplers that run another one, ``base``, and judge what it makes.

Particle j of an item is an item of its own for the base sampler, with the noise of branch j of the
item. Branch 0 draws as the item itself does, so one particle is the base sampler token for token.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Evaluator, Scorer, read_scorer
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler, spell
from gen.core.rng import RNG
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput, Stats
from gen.models.targets.base import Target
from gen.samplers.search.budget import Budget


@dataclass(frozen=True)
class SearchSampler(Sampler):
    """Sampler that runs ``base``.

    ``base``: the sampler that makes candidates, by name or with its parameters. ``scorer``: the
    reward, higher is better. ``budget``: most that an item may cost, such as ``500 passes``.
    """

    base: Any = "autoregressive"
    scorer: Any = "checker"
    budget: Any = None

    wraps: ClassVar[bool] = True
    kinds = ("codes", "latents")
    guarantee = "approximate"

    def __post_init__(self) -> None:
        # whatever is wrong with them is an error now
        resolve_sampler(self.base, where="sampler.base")
        object.__setattr__(self, "base", spell(self.base))
        super().__post_init__()
        read_scorer(self.scorer)
        Budget.read(self.budget)

    @cached_property
    def inner(self) -> Sampler:
        """The base sampler."""
        return resolve_sampler(self.base, where="sampler.base")[0]

    @property
    def protocol(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.protocol

    @property
    def drafted(self) -> bool:
        return self.inner.drafted

    @property
    def takes_several_drafts(self) -> bool:
        return self.inner.takes_several_drafts

    @property
    def draft_names(self) -> tuple[str | None, ...]:
        return self.inner.draft_names

    @property
    def draft_protocol(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.draft_protocol

    @property
    def timed(self) -> bool:
        budget = Budget.read(self.budget)
        return self.inner.timed or (budget is not None and budget.unit == "seconds")

    @property
    def reproducible(self) -> bool:
        budget = Budget.read(self.budget)
        return self.inner.reproducible and (budget is None or budget.unit != "seconds")

    @property
    def returns_logprobs(self) -> bool:
        return False

    @property
    def counts_steps(self) -> bool:
        return False

    @property
    def constraint_refusal(self) -> str:
        return self.inner.constraint_refusal


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


class Particles:
    """Particles of some items: P copies of each with noise of their own.

    Args:
        target: target of N items.
        rng: random numbers by item.
        draft: target of the draft model, or of each.
        canvas: [N, T(, C)] or None.
        items: items that get particles, int64 [n].
        branches: branch of each particle of each item, int64 [n, P].
        stepped: whether the particles are stepped, all of them side by side; else those of as many
            items as the target has rows are decoded at a time.

    Attributes:
        count: P.
        owners: item of each particle, int64 [n P].
        branches: branch of each particle, int64 [n P].
        target, draft, canvas: those of the particles.
    """

    def __init__(
        self,
        target: Target,
        rng: RNG,
        draft: Any,
        canvas: Tensor | None,
        items: np.ndarray,
        branches: np.ndarray,
        stepped: bool = False,
    ):
        self.count = branches.shape[1]
        self.item_rng, self.owners = rng, np.repeat(items, self.count)
        self.branches = branches.reshape(-1).astype(np.int64)
        at_once = len(items) if stepped else target.rows
        self.target = self._of_owners(target, at_once)
        if target.evaluator is not None:
            self.target.evaluator = OwnersEvaluator(target.evaluator, self.owners)
        drafts = draft if isinstance(draft, (list, tuple)) else [draft]
        expanded = tuple(None if d is None else self._of_owners(d, at_once) for d in drafts)
        self.draft = expanded if isinstance(draft, (list, tuple)) else expanded[0]
        self.canvas = None
        if canvas is not None:
            self.canvas = canvas[torch.from_numpy(self.owners).to(canvas.device)]

    def _of_owners(self, target: Target, at_once: int) -> Any:
        """Return the target of the particles; those of ``at_once`` items are rows at a time."""
        expanded = target.of_items(self.owners)
        if at_once * self.count < expanded.items and expanded.replaces:
            expanded.at_most(at_once * self.count)
        return expanded

    @property
    def rng(self) -> RNG:
        """Random numbers with a key per particle."""
        return self.item_rng.of_branches(self.owners, self.branches)


class Search:
    """What the searches of one call share: items, their scores and their costs.

    Args:
        sampler: the search.
        target: target of N items.
        rng: random numbers by item.

    Attributes:
        evaluator: judges outputs.
        scorer: the reward.
        costs: statistics of what each item has cost, one entry per run of each item.
    """

    def __init__(self, sampler: SearchSampler, target: Target, rng: RNG):
        self.sampler, self.target, self.rng = sampler, target, rng
        self.began = time.perf_counter()
        self.evaluator = require_evaluator(target, sampler)
        self.scorer: Scorer = read_scorer(sampler.scorer)
        self.budget = Budget.read(sampler.budget)
        self.costs: list[list[Stats]] = [[] for _ in range(target.items)]

    def scores(
        self,
        tokens: Tensor,
        items: np.ndarray,
        known: Tensor | None = None,
        scorer: Scorer | None = None,
    ) -> np.ndarray:
        """Score outputs: float64 [n]; see ``Evaluator.scores``."""
        return self.evaluator.scores(scorer or self.scorer, tokens, items, known)

    def add_costs(self, items: np.ndarray, stats: Sequence[Stats]) -> None:
        """Note what runs have cost."""
        for item, cost in zip(items.tolist(), stats, strict=True):
            self.costs[item].append(cost)

    def has_budget(self) -> np.ndarray:
        """Find the items that have not spent their budget: bool [N]."""
        return self.affords(self.costs)

    def affords(self, costs: Sequence[Sequence[Stats]]) -> np.ndarray:
        """Tell which of some items have not spent their budget: bool [n].

        Args:
            costs: statistics of what each of them has cost.
        """
        if self.budget is None:
            return np.ones(len(costs), dtype=bool)
        seconds = time.perf_counter() - self.began
        spent = [self.budget.is_spent(joint_cost(c), seconds) for c in costs]
        return ~np.asarray(spent, dtype=bool)

    def choose(self, logp: np.ndarray, purpose: str, step: int, items: np.ndarray) -> np.ndarray:
        """Draw one of K possibilities for each item, keyed by the item and the step: int64 [n].

        Args:
            logp: log-probabilities [n, K].
            purpose: name of the decision.
            step: number of the decision.
            items: items that decide, int64 [n].
        """
        rows = torch.from_numpy(items)
        device = self.target.device
        drawn = self.rng.categorical(
            torch.from_numpy(logp).to(device)[:, None],
            rows.to(device),
            torch.zeros(len(items), 1, dtype=torch.long, device=device),
            purpose,
            torch.full((len(items),), step, dtype=torch.long, device=device),
            torch.ones(len(items), 1, dtype=torch.bool, device=device),
        )
        return drawn[:, 0].cpu().numpy()

    def output(self, tokens: Tensor, candidates: list, traces: list | None) -> SampleOutput:
        """Return the chosen tokens [N, T(, C)] with the cost of all candidates."""
        seconds = (time.perf_counter() - self.began) / len(tokens)
        stats = [
            replace(joint_cost(costs), tokens=count, seconds=seconds)
            for costs, count in zip(self.costs, num_tokens(tokens, self.target), strict=True)
        ]
        return SampleOutput(tokens, stats, traces, candidates=candidates)


def require_evaluator(target: Target, sampler: Sampler) -> Evaluator:
    """Return what judges the outputs of a target.

    Raises:
        GenError: nobody gave one.
    """
    if target.evaluator is None:
        raise GenError(
            f"{type(sampler).__name__} scores outputs, and this call decodes tokens alone;"
            " expected a call of a pipeline, which knows prompts and media"
        )
    return target.evaluator


def joint_cost(parts: Sequence[Stats]) -> Stats:
    """Add up what several runs of an item have cost; ``tokens`` are those of all of them."""
    nfe, tokens = sum(p.nfe for p in parts), sum(p.tokens for p in parts)
    drafts = [p.draft_nfe for p in parts if p.draft_nfe is not None]
    memory = [p.peak_memory for p in parts if p.peak_memory is not None]
    partial = [p.partial_nfe for p in parts if p.partial_nfe is not None]
    length = max((len(p.acceptance_histogram) for p in parts), default=0)
    histogram = [
        sum(p.acceptance_histogram[k] for p in parts if k < len(p.acceptance_histogram))
        for k in range(length)
    ]
    accepted = sum(k * count for k, count in enumerate(histogram))
    rates = [p for p in parts if p.draft_acceptance_rate]
    drafted = sum(_accepted(p) / (p.draft_acceptance_rate or 1) for p in rates)
    return Stats(
        nfe,
        tokens,
        sum(p.tokens_computed for p in parts),
        sum(p.positions_computed for p in parts),
        tokens / nfe if nfe else 0.0,
        accepted / drafted if drafted else None,
        histogram,
        sum(drafts) if drafts else None,
        sum(p.seconds for p in parts),
        max(memory) if memory else None,
        sum(partial) if partial else None,
    )


def _accepted(stats: Stats) -> int:
    """Count the accepted drafts of a histogram."""
    return sum(k * count for k, count in enumerate(stats.acceptance_histogram))


def num_tokens(tokens: Tensor, target: Target) -> list[int]:
    """Count the tokens of each row [N, T(, C)], up to and including its end."""
    if tokens.ndim > 2:
        return [tokens.shape[1]] * len(tokens)
    is_end = target.space.is_end(tokens)
    first = torch.where(is_end.any(1), is_end.long().argmax(1) + 1, tokens.shape[1])
    return first.tolist()
