"""Targets that compute some positions per forward pass and keep the keys and values of others.

A model that attends both ways changes all keys with every committed token, so keeping any of them
is an approximation, and which to keep is a policy (``gen.samplers.masked.parts.caches``). Before
every forward pass it decides, per row:

    compute   positions that are sent through the model: their outputs become fresh, their keys and
              values are written
    attend    positions that these attend to, of those written before or computed now
    refresh   whether the row begins anew: everything in ``attend`` is computed, everything else
              forgotten

What the model says of a position that is not computed is what it said when it was computed last.
Only positions that are ``fresh`` may be committed. Each row has its own sets. Rows that refresh and
rows that do not go through the model in two forward passes, so that one row's refresh costs the
others nothing. ``CachedMaskedTarget`` does this for token ids, ``CachedLatentTarget`` for latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.targets.base import Target


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
    """State of the cache per row; the prompt's columns count as token 0, and of latents
    a masked position as 0, a known one as 1.

    Attributes:
        tokens: tokens that the keys come from, -1 without keys, long [B, P + T].
        refresh_tokens: tokens at the last refresh, -1 before it, long [B, P + T].
        steps_since_refresh: long [B], -1 before the first refresh.
        outputs: newest output of every position by branch, logits [H, B, T, V] or conditioning
            vectors [H, B, T, D]; None before the first forward pass.
    """

    tokens: Tensor
    refresh_tokens: Tensor
    steps_since_refresh: Tensor
    outputs: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> CacheRows:
        """State of rows before their first forward pass; ``width`` is P + T."""
        tokens = torch.full((rows, width), -1, device=device)
        return cls(tokens, tokens.clone(), torch.full((rows,), -1, device=device))

    def select(self, rows: Tensor) -> CacheRows:
        """State of some rows, bool [B] or their numbers long [n]."""
        outputs = None if self.outputs is None else self.outputs[:, rows]
        return CacheRows(
            self.tokens[rows], self.refresh_tokens[rows], self.steps_since_refresh[rows], outputs
        )

    def reset(self, rows: Tensor) -> CacheRows:
        """State with some rows (bool [B]) as before their first forward pass.

        Their keys stay in the slots, which nothing reads before they are written again.
        """
        if self.outputs is not None:
            self.outputs.masked_fill_(rows[:, None, None], 0)
        return CacheRows(
            self.tokens.masked_fill(rows[:, None], -1),
            self.refresh_tokens.masked_fill(rows[:, None], -1),
            self.steps_since_refresh.masked_fill(rows, -1),
            self.outputs,
        )


class PartialTarget(Target):
    """Masked target that computes what its policy decides: mixin before ``MaskedTarget`` or
    ``MaskedLatentTarget``.

    Call ``prepare`` before ``predict``. A ``predict`` without it refreshes all rows. The columns of
    ``Slots`` are the P positions that the model has before the canvas, then the canvas.
    """

    policy: Policy
    cache: Any

    @property
    def opens(self) -> bool:
        """False: columns of the cache keep their meaning for the items of the start."""
        return False

    def _begin(self, policy: Policy, prefix: int, slots: int) -> None:
        """Set up an empty cache of ``slots`` slots; ``prefix`` is P."""
        self.policy, self._prefix = policy, prefix
        self.cache = self.model.new_cache(slots)
        self._state = CacheRows.empty(self.rows, prefix + self.length, self.device)
        self._plan: Plan | None = None

    def with_params(self, sampling: SamplingParams) -> Self:
        """Make a fresh target of the same model and items with other sampling parameters."""
        return self.made_of(self, self.policy, sampling)

    @classmethod
    def made_of(cls, target: Target, policy: Policy, sampling: SamplingParams) -> Self:
        """Make a fresh target with a cache from the model and items of another."""
        fresh = cls(*target._init_args(sampling), policy=policy)  # type: ignore[call-arg]
        fresh.name = target.name
        fresh.at_most(target.rows)
        return fresh

    def at_most(self, rows: int) -> None:
        """See ``Target.at_most``."""
        super().at_most(rows)
        self._state = CacheRows.empty(self.rows, self._prefix + self.length, self.device)

    def _reset_rows(self, rows: np.ndarray) -> None:
        self._state = self._state.reset(torch.from_numpy(rows).to(self.device))

    def keep(self, rows: Tensor) -> None:
        """See ``Target.keep``."""
        self.cache.keep(self.prompts.branch_rows(rows))
        super().keep(rows)
        self._state = self._state.select(rows)

    def prepare(self, step) -> None:
        """Ask the policy what the next forward pass computes.

        Args:
            step: ``MaskedStep`` with its canvas view and block progress.

        Raises:
            GenError: the policy leaves a row nothing to commit.
        """
        super().prepare(step)
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

    def _run(self, canvas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the forward passes that were planned for canvases [B, T(, C)].

        Returns:
            Which positions are fresh, bool [B, T]; positions of its own that each row had computed,
            and those with padding, long [B].
        """
        tokens, state = self._columns(canvas), self._state
        compute, attend, refresh = self._plan or Plan(
            tokens >= 0, tokens >= 0, torch.ones(self.rows, dtype=torch.bool, device=self.device)
        )
        self._plan = None
        compute = self._computed(compute, canvas)
        kept = state.tokens.masked_fill(refresh[:, None], -1)
        state.tokens = torch.where(compute, tokens, kept)
        state.refresh_tokens = torch.where(refresh[:, None], tokens, state.refresh_tokens)
        state.steps_since_refresh = torch.where(refresh, 0, state.steps_since_refresh + 1)
        attend = (attend | compute) & (state.tokens >= 0)
        fresh = torch.zeros(canvas.shape[:2], dtype=torch.bool, device=self.device)
        num_computed = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        num_positions = torch.zeros_like(num_computed)
        for group in (refresh, ~refresh):
            if bool(group.any()):
                some = group.nonzero()[:, 0]
                num_computed[group], num_positions[group] = self._forward(
                    some, compute[group], attend[group], canvas[group], fresh
                )
        return fresh, num_computed, num_positions

    def _outputs(self, like: Tensor) -> Tensor:
        """Newest outputs by branch [H, B, T, ...], made at the first call for outputs ``like``."""
        if self._state.outputs is None:
            shape = (self.branches, self.rows, self.length, like.shape[-1])
            self._state.outputs = like.new_zeros(shape)
        return self._state.outputs

    def _columns(self, canvas: Tensor) -> Tensor:
        """Tokens [b, P + T] that stand in the columns of ``Slots``, 0 before the canvas."""
        raise NotImplementedError

    def _computed(self, compute: Tensor, canvas: Tensor) -> Tensor:
        """Columns [b, P + T] that have to be computed for those of ``compute`` to be fresh."""
        return compute

    def _forward(
        self, rows: Tensor, compute: Tensor, attend: Tensor, canvas: Tensor, fresh: Tensor
    ) -> tuple[Tensor, int]:
        """Run one forward pass of some rows and store its outputs.

        Args:
            rows: the rows, long [n].
            compute: columns to send through the model, bool [n, P + T].
            attend: columns that these attend to, bool [n, P + T].
            canvas: tokens or latents [n, T(, C)].
            fresh: positions that were computed, bool [B, T]; marked here.

        Returns:
            Positions of its own that each row had computed, long [n], and those with padding.
        """
        raise NotImplementedError
