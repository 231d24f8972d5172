"""Masked models with a cache: a call computes some places of the canvas and looks at the stored
keys and values of others.

A causal model's cache is exact. A model that looks both ways changes all keys with every committed
id, so keeping any of them is an approximation, and which to keep is a policy
(``gen.samplers.masked.parts.caches``). Before every call it says, per row,

    compute   which places are sent through the model: their law becomes fresh, their keys and
              values are written
    attend    which places these look at, of what was written before or is computed now
    refresh   whether the row starts anew: everything in ``attend`` is computed, everything else
              forgotten

Keys stand in one slot per absolute position (``gen.models.adapters.slot_cache``) and are computed
with explicit position ids, so what is stored does not move. The law of a place that is not computed
is the one it had when it was computed last, or even over all legal ids if it never was; ``fresh``
says which places are not like that, and only those may be committed.

Each row has its own sets. Rows that refresh and rows that do not go through the model in two calls,
so that one row's refresh costs the others nothing; inside a call shorter rows repeat one of their
places, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.protocols import CacheableModel
from gen.models.targets.base import StepOutput
from gen.models.targets.masked import MaskedTarget


class Slots(NamedTuple):
    """What the cache of b rows holds before a call. Columns: the P places of the longest condition,
    those of shorter ones moved to the right, then the T places of the canvas. Bool [b, P + T]:
    ``written`` (there are keys), ``current`` (computed from the id that stands there now),
    ``changed`` (another id stood there at the last refresh). ``since`` long [b]: calls after the
    last refresh, -1 before the first. ``prefix``: P."""

    written: Tensor
    current: Tensor
    changed: Tensor
    since: Tensor
    prefix: int


class Plan(NamedTuple):
    """What a policy says: ``compute`` and ``attend`` bool [b, P + T], columns as in ``Slots``;
    ``refresh`` bool [b]. See the module."""

    compute: Tensor
    attend: Tensor
    refresh: Tensor


# a policy sees a step of the masked loop before its law is there, and the cache
Policy = Callable[[object, Slots], Plan]


class CachedMaskedTarget(MaskedTarget):
    """A ``MaskedTarget`` that computes what its policy says. Call ``prepare`` before ``predict``; a
    ``predict`` without it refreshes all rows, and one with ``of`` neither looks at the cache nor
    changes it. ``fresh`` bool [b, T]: whose law the last call computed.
    """

    model: CacheableModel
    policy: Policy

    def __init__(self, *args, policy: Policy, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = policy
        self._lined = self._aligned()[
            :2
        ]  # of all items: columns stay where they are, whoever comes
        self._condition, self._start = self._lined  # and the column of each row's first id, [H B]
        self._prefix = self._condition.shape[1]
        width = self._prefix + self.length
        self.cache = self.model.new_cache(width)
        self._held = torch.full(
            (self.rows, width), -1, device=self.device
        )  # ids that the keys were computed from; 0 stands for all of the condition
        self._then = self._held.clone()  # ids at the last refresh
        self._since = torch.full((self.rows,), -1, device=self.device)
        self._kept: Tensor | None = None  # the newest logits of every place, [H B, T, V]
        self._plan: Plan | None = None
        self.fresh = torch.zeros(self.rows, self.length, dtype=torch.bool, device=self.device)

    def with_params(self, sampling: SamplingParams) -> CachedMaskedTarget:
        return _made(self, sampling, self.policy)

    def at_most(self, rows: int) -> None:
        super().at_most(rows)
        some = slice(self.rows)
        self._held, self._then, self._since, self.fresh = (
            self._held[some],
            self._then[some],
            self._since[some],
            self.fresh[some],
        )

    def _choose(self) -> None:
        super()._choose()
        self._condition, self._start = (x[self._both()] for x in self._lined)

    def _renew(self, again: np.ndarray) -> None:
        """As before the first call: what the slots hold is not looked at."""
        rows = torch.from_numpy(again).to(self.device)
        self._held, self._then = (
            x.masked_fill(rows[:, None], -1) for x in (self._held, self._then)
        )
        self._since = self._since.masked_fill(rows, -1)
        if self._kept is not None:
            self._kept[rows.repeat(self.branches)] = 0

    def prepare(self, now) -> None:
        """Asks the policy what the next call computes. ``now``: the step, with everything but its
        sampling: ``canvas``, ``masked``, ``open`` [b, T] and what else the policy looks at. Raises
        ``GenError`` for a policy that leaves a row nothing to commit.
        """
        stand = self._stand(now.canvas)
        plan = self.policy(
            now,
            Slots(
                self._held >= 0, self._held == stand, self._then != stand, self._since, self._prefix
            ),
        )
        refresh = plan.refresh | (self._since < 0)
        compute = torch.where(refresh[:, None], plan.attend, plan.compute)
        wanted = now.masked & now.open
        if bool((wanted.any(1) & ~(wanted & compute[:, self._prefix :]).any(1)).any()):
            raise GenError(
                "the cache policy computes none of the places that may be committed; expected at"
                " least one in every row"
            )
        self._plan = Plan(compute, plan.attend, refresh)

    def predict(self, canvas: Tensor, of: Tensor | None = None) -> StepOutput:
        """Canvas [B, T] -> log-probabilities [B, T, V] of all places, ``fresh`` or not; and how
        many places of its own each row had computed, long [B]."""
        if of is not None:
            return super().predict(canvas, of)
        stand = self._stand(canvas)
        compute, attend, refresh = self._plan or Plan(
            stand >= 0, stand >= 0, torch.ones(self.rows, dtype=torch.bool, device=self.device)
        )
        self._plan = None
        if self.model.shift:  # the law of an empty place comes out one place before it
            wanted = compute[:, self._prefix :] & self.space.is_masked(canvas)
            compute = compute.clone()
            compute[:, self._prefix - 1 : -1] |= wanted
        self._held = torch.where(compute, stand, self._held.masked_fill(refresh[:, None], -1))
        self._then = torch.where(refresh[:, None], stand, self._then)
        self._since = torch.where(refresh, 0, self._since + 1)
        attend = (attend | compute) & (self._held >= 0)
        self.fresh = torch.zeros_like(canvas, dtype=torch.bool)
        positions = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        for group in (refresh, ~refresh):
            if bool(group.any()):
                positions[group] = self._call(
                    group.nonzero()[:, 0], compute[group], attend[group], canvas[group]
                )
        logits = self._kept
        return StepOutput(
            self._law(logits, self.legal), positions, raw=lambda: self._raw(logits, self.legal)
        )

    def _stand(self, canvas: Tensor) -> Tensor:
        return torch.nn.functional.pad(canvas, (self._prefix, 0))

    def _call(self, rows: Tensor, compute: Tensor, attend: Tensor, canvas: Tensor) -> Tensor:
        """One forward call of some rows [n], of which everything else is [n, ...]; how many places
        of its own each of them had computed [n]."""
        prefix, shift, branches = self._prefix, self.model.shift, self.branches
        both = torch.cat([rows + half * self.rows for half in range(branches)])
        ids = torch.cat([self._condition[both], canvas.repeat(branches, 1)], 1)
        start = self._start[both][:, None]
        column = torch.arange(ids.shape[1], device=self.device)
        todo = compute.repeat(branches, 1) & (column >= start)
        width = int(todo.sum(1).max())
        at = todo.long().argsort(dim=1, stable=True)[
            :, -width:
        ]  # what is computed, in order, at the right end
        real = todo.gather(1, at)
        at = torch.where(real, at, at[:, -1:])
        seen = attend.repeat(branches, 1).gather(1, (column + start).clamp_max(len(column) - 1)) & (
            column + start < len(column)
        )
        position = at - prefix + shift
        real &= position >= 0
        keep = int(real.sum(1).max())
        some = None if len(rows) == self.rows else both
        logits = self.model.part(ids.gather(1, at), at - start, seen, self.cache, keep, some)
        position, real = position[:, -keep:], (real & (position < canvas.shape[1]))[:, -keep:]
        if self._kept is None:
            self._kept = logits.new_zeros(
                self.branches * self.rows, canvas.shape[1], logits.shape[-1]
            )
        row, slot = real.nonzero().unbind(1)
        self._kept[both[row], position[row, slot]] = logits[row, slot]
        self.fresh[both[row] % self.rows, position[row, slot]] = True
        return todo.sum(1).view(branches, -1).sum(0)

    def keep(self, rows: Tensor) -> None:
        both = rows.repeat(self.branches)
        super().keep(rows)
        self.cache.keep(both)
        self._condition, self._start = self._condition[both], self._start[both]
        self._held, self._then, self._since, self.fresh = (
            self._held[rows],
            self._then[rows],
            self._since[rows],
            self.fresh[rows],
        )
        if self._kept is not None:
            self._kept = self._kept[both]


def cached(target, policy: Policy) -> CachedMaskedTarget:
    """A fresh target of the same model, condition and law with a cache. Raises ``GenError`` for
    anything but a masked model of ids that can compute some of its places (``CacheableModel``)."""
    if not isinstance(target, MaskedTarget) or not hasattr(target.model, "part"):
        raise GenError(
            f"{type(target).__name__} of {type(target.model).__name__} keeps no keys and values"
            " between calls; expected a masked language model, or no cache"
        )
    return _made(target, target.sampling, policy)


def _made(target: MaskedTarget, sampling: SamplingParams, policy: Policy) -> CachedMaskedTarget:
    fresh = CachedMaskedTarget(*target._init_args(sampling), policy=policy)
    fresh.at_most(target.rows)
    return fresh
