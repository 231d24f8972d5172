"""Target of masked models with a key-value cache.

A forward pass computes some positions and attends to the stored keys and values of others.

A causal model's cache is exact. A model that attends both ways changes all keys with every
committed token, so keeping any of them is an approximation, and which to keep is a policy
(``gen.samplers.masked.parts.caches``). Before every forward pass it decides, per row:

    compute   positions that are sent through the model: their logits become fresh, their keys and
              values are written
    attend    positions that these attend to, of those written before or computed now
    refresh   whether the row begins anew: everything in ``attend`` is computed, everything else
              forgotten

Keys have one slot per absolute position (``gen.models.adapters.slot_cache``) and are computed with
explicit position ids, so what is stored does not move. The distribution of a position that is not
computed is the one it had when it was computed last, or uniform over all legal tokens if it never
was. Only positions that are ``fresh`` may be committed.

Each row has its own sets. Rows that refresh and rows that do not go through the model in two
forward passes, so that one row's refresh costs the others nothing. Inside a forward pass shorter
rows repeat one of their positions, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.protocols import CacheableModel, PartialModel
from gen.models.targets.base import StepOutput
from gen.models.targets.masked import MaskedTarget


class Slots(NamedTuple):
    """Content of the cache of b rows before a forward pass.

    Columns are the P positions of the longest prompt, shorter ones moved to the right, and then the
    T positions of the canvas.

    Attributes:
        written: columns with keys, bool [b, P + T].
        current: columns whose keys come from the token that stands there now, bool [b, P + T].
        changed: columns where another token stood at the last refresh, bool [b, P + T].
        steps_since_refresh: forward passes after the last refresh, -1 before it, long [b].
        prefix: P.
    """

    written: Tensor
    current: Tensor
    changed: Tensor
    steps_since_refresh: Tensor
    prefix: int


class Plan(NamedTuple):
    """Decision of a policy, in the columns of ``Slots``; see the module.

    Attributes:
        compute: bool [b, P + T].
        attend: bool [b, P + T].
        refresh: bool [b].
    """

    compute: Tensor
    attend: Tensor
    refresh: Tensor


# a policy reads a step of the masked loop before its forward pass, and the cache
Policy = Callable[[object, Slots], Plan]


@dataclass
class CacheRows:
    """State of the cache per row; the prompt's columns count as token 0.

    Attributes:
        tokens: tokens that the keys come from, -1 without keys, long [B, P + T].
        refresh_tokens: tokens at the last refresh, -1 before it, long [B, P + T].
        steps_since_refresh: long [B], -1 before the first refresh.
        logits: newest logits of every position by branch, [H, B, T, V]; None before the first
            forward pass.
    """

    tokens: Tensor
    refresh_tokens: Tensor
    steps_since_refresh: Tensor
    logits: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> CacheRows:
        """State of rows before their first forward pass; ``width`` is P + T."""
        tokens = torch.full((rows, width), -1, device=device)
        return cls(tokens, tokens.clone(), torch.full((rows,), -1, device=device))

    def select(self, rows: Tensor) -> CacheRows:
        """State of some rows, bool [B] or their numbers long [n]."""
        logits = None if self.logits is None else self.logits[:, rows]
        return CacheRows(
            self.tokens[rows], self.refresh_tokens[rows], self.steps_since_refresh[rows], logits
        )

    def reset(self, rows: Tensor) -> CacheRows:
        """State with some rows (bool [B]) as before their first forward pass.

        Their keys stay in the slots, which nothing reads before they are written again.
        """
        if self.logits is not None:
            self.logits.masked_fill_(rows[:, None, None], 0)
        return CacheRows(
            self.tokens.masked_fill(rows[:, None], -1),
            self.refresh_tokens.masked_fill(rows[:, None], -1),
            self.steps_since_refresh.masked_fill(rows, -1),
            self.logits,
        )


class CachedMaskedTarget(MaskedTarget):
    """Masked target that computes what its policy decides.

    Call ``prepare`` before ``predict``. A ``predict`` without it refreshes all rows. One with
    ``rows`` neither reads the cache nor changes it.
    """

    model: CacheableModel  # pyright: ignore[reportIncompatibleVariableOverride]
    policy: Policy

    def __init__(self, *args, policy: Policy, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = policy
        # of all items: columns keep their meaning, whatever items the rows hold
        self._all_prompts = self._aligned()[:2]
        # prompts of the rows, and the column of each prompt's first token, [H B]
        self._prompts, self._first_column = self._all_prompts
        self._prefix = self._prompts.shape[1]
        width = self._prefix + self.length
        self.cache = self.model.new_cache(width)
        self._state = CacheRows.empty(self.rows, width, self.device)
        self._plan: Plan | None = None

    def with_params(self, sampling: SamplingParams) -> CachedMaskedTarget:
        """Make a fresh target of the same model and items with other sampling parameters."""
        return _made(self, sampling, self.policy)

    def at_most(self, rows: int) -> None:
        """See ``Target.at_most``."""
        super().at_most(rows)
        width = self._prefix + self.length
        self._state = CacheRows.empty(self.rows, width, self.device)

    def _follow_items(self) -> None:
        items = torch.from_numpy(self.prompts.branch_items()).to(self.device)
        self._prompts, self._first_column = (x[items] for x in self._all_prompts)

    def _reset_rows(self, rows: np.ndarray) -> None:
        self._state = self._state.reset(torch.from_numpy(rows).to(self.device))

    def keep(self, rows: Tensor) -> None:
        """See ``Target.keep``."""
        branch_rows = self.prompts.branch_rows(rows)
        super().keep(rows)
        self.cache.keep(branch_rows)
        self._prompts = self._prompts[branch_rows]
        self._first_column = self._first_column[branch_rows]
        self._state = self._state.select(rows)

    def prepare(self, step) -> None:
        """Ask the policy what the next forward pass computes.

        Args:
            step: ``MaskedStep`` with its canvas view and block progress.

        Raises:
            GenError: the policy leaves a row nothing to commit.
        """
        tokens, state = self._columns(step.canvas), self._state
        slots = Slots(
            state.tokens >= 0,
            state.tokens == tokens,
            state.refresh_tokens != tokens,
            state.steps_since_refresh,
            self._prefix,
        )
        plan = self.policy(step, slots)
        refresh = plan.refresh | (state.steps_since_refresh < 0)
        compute = torch.where(refresh[:, None], plan.attend, plan.compute)
        could_commit = step.masked & step.open
        will_commit = could_commit & compute[:, self._prefix :]
        if bool((could_commit.any(1) & ~will_commit.any(1)).any()):
            raise GenError(
                "the cache policy computes none of the positions that may be committed; expected"
                " at least one in every row"
            )
        self._plan = Plan(compute, plan.attend, refresh)

    def predict(self, canvas: Tensor, rows: Tensor | None = None) -> StepOutput:
        """Run the forward passes that were planned.

        Args:
            canvas: tokens long [B, T].
            rows: as in ``MaskedTarget.predict``; with it the cache is left alone.

        Returns:
            Log-probabilities [B, T, V] of all positions, and which of them are fresh.
        """
        if rows is not None:
            return super().predict(canvas, rows)
        tokens, state = self._columns(canvas), self._state
        compute, attend, refresh = self._plan or Plan(
            tokens >= 0, tokens >= 0, torch.ones(self.rows, dtype=torch.bool, device=self.device)
        )
        self._plan = None
        if self.model.shift:
            # the logits of a masked position come out one position before it
            masked = compute[:, self._prefix :] & self.space.is_masked(canvas)
            compute = compute.clone()
            compute[:, self._prefix - 1 : -1] |= masked
        kept = state.tokens.masked_fill(refresh[:, None], -1)
        state.tokens = torch.where(compute, tokens, kept)
        state.refresh_tokens = torch.where(refresh[:, None], tokens, state.refresh_tokens)
        state.steps_since_refresh = torch.where(refresh, 0, state.steps_since_refresh + 1)
        attend = (attend | compute) & (state.tokens >= 0)
        fresh = torch.zeros_like(canvas, dtype=torch.bool)
        num_computed = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        num_positions = torch.zeros_like(num_computed)
        for group in (refresh, ~refresh):
            if bool(group.any()):
                some = group.nonzero()[:, 0]
                num_computed[group], num_positions[group] = self._forward(
                    some, compute[group], attend[group], canvas[group], fresh
                )
        assert state.logits is not None, "a row computes something in every forward pass"
        logits, legal = state.logits.flatten(0, 1), self._allowed(canvas)
        return StepOutput(
            self._logprobs(logits, legal),
            num_computed,
            num_positions,
            raw=lambda: self._raw(logits, legal),
            fresh=fresh,
            under=self._under(logits),
        )

    def _columns(self, canvas: Tensor) -> Tensor:
        """Tokens [b, P + T] that stand in the columns of ``Slots``, 0 for the prompt."""
        return torch.nn.functional.pad(canvas, (self._prefix, 0))

    def _forward(
        self, rows: Tensor, compute: Tensor, attend: Tensor, canvas: Tensor, fresh: Tensor
    ) -> tuple[Tensor, int]:
        """Run one forward pass of some rows and store its logits.

        Args:
            rows: the rows, long [n].
            compute: columns to send through the model, bool [n, P + T].
            attend: columns that these attend to, bool [n, P + T].
            canvas: tokens long [n, T].
            fresh: positions that were computed, bool [B, T]; marked here.

        Returns:
            Positions of its own that each row had computed, long [n], and those with padding.
        """
        prefix, shift, branches = self._prefix, self.model.shift, self.branches
        branch_rows = torch.cat([rows + branch * self.rows for branch in range(branches)])
        tokens = torch.cat([self._prompts[branch_rows], canvas.repeat(branches, 1)], 1)
        start = self._first_column[branch_rows][:, None]
        column = torch.arange(tokens.shape[1], device=self.device)
        todo = compute.repeat(branches, 1) & (column >= start)
        width = int(todo.sum(1).max())
        # computed columns in their order, at the right end
        columns = todo.long().argsort(dim=1, stable=True)[:, -width:]
        real = todo.gather(1, columns)
        columns = torch.where(real, columns, columns[:, -1:])
        exists = column + start < len(column)
        slot = (column + start).clamp_max(len(column) - 1)
        seen = attend.repeat(branches, 1).gather(1, slot) & exists
        position = columns - prefix + shift
        real &= position >= 0
        keep = int(real.sum(1).max())
        some = None if len(rows) == self.rows else branch_rows
        logits = self.model.part(
            tokens.gather(1, columns), columns - start, seen, self.cache, keep, some
        )
        position, real = position[:, -keep:], (real & (position < canvas.shape[1]))[:, -keep:]
        stored = self._state.logits
        if stored is None:
            shape = (branches, self.rows, canvas.shape[1], logits.shape[-1])
            stored = self._state.logits = logits.new_zeros(shape)
        row, slot = real.nonzero().unbind(1)
        stored.flatten(0, 1)[branch_rows[row], position[row, slot]] = logits[row, slot]
        fresh[branch_rows[row] % self.rows, position[row, slot]] = True
        return todo.sum(1).view(branches, -1).sum(0), width * branches


def cached(target, policy: Policy) -> CachedMaskedTarget:
    """Make a fresh target of the same model, prompts and sampling parameters with a cache.

    Args:
        target: masked target of token ids whose model can compute some of its positions
            (``CacheableModel``).
        policy: decides what every forward pass computes.

    Raises:
        GenError: the target is another one.
    """
    if not isinstance(target, MaskedTarget) or not isinstance(target.model, PartialModel):
        raise GenError(
            f"{type(target).__name__} of {type(target.model).__name__} keeps no keys and values"
            " between forward passes; expected a masked language model, or no cache"
        )
    return _made(target, target.sampling, policy)


def _made(target: MaskedTarget, sampling: SamplingParams, policy: Policy) -> CachedMaskedTarget:
    fresh = CachedMaskedTarget(*target._init_args(sampling), policy=policy)
    fresh.name = target.name
    fresh.at_most(target.rows)
    return fresh
