"""Batch slots: which item each row of the batch holds.

A target may hold fewer rows than it has items (``Target.at_most``). A row that is finished takes
the next waiting item, or leaves the batch where none waits. ``BatchSlots`` decides that, and tells
every target (the model, and a draft or judge model beside it) and every ``RowStore`` that was
attached. Nothing a row draws depends on which row of the batch it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gen.core.rng import CounterRNG
from gen.models.targets.base import Target
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowSelection, RowStore


@dataclass(frozen=True)
class SlotChange:
    """Outcome of a step for the rows of the batch.

    ``replaced``: the rows before the change that hold another item now; None where none does.
    ``kept``: the rows before the change that stay, replaced ones included; None where all do.
    """

    replaced: RowSelection | None
    kept: RowSelection | None

    def follow(self, x: Any, start: Any = None) -> Any:
        """Apply the change to ``x`` [b, ...], a tensor, an array or a list.

        Args:
            x: state of the rows before the change.
            start: what a replaced row begins with, as in ``RowStore.register``; None leaves it.
        """
        if self.replaced is not None and start is not None:
            x = self.replaced.fill(x, start)
        return x if self.kept is None else self.kept.take(x)

    def extend(self, x: Any, start: Any) -> Any:
        """Apply the change of a batch that has grown to ``x`` [b, ...].

        Args:
            x: state of the rows before the change.
            start: what a new row begins with, as in ``RowStore.register``.
        """
        assert self.kept is not None and self.replaced is not None, "a batch that has grown"
        if not len(x):  # no row was left: any content will do, which is replaced
            shape = (len(self.kept), *x.shape[1:])
            x = x.new_zeros(shape) if isinstance(x, Tensor) else np.zeros(shape, dtype=x.dtype)
            return self.replaced.fill(x, start)
        return self.replaced.fill(self.kept.take(x), start)


class BatchSlots:
    """Rows of a batch and the items they hold.

    Attributes:
        items: int64 [b], the item of each row; an array that is never written to.
        rows: the same on the target's device, long [b].
        branches: branch of its item that each row is, int64 [b]: 0 unless it was forked.

    Args:
        target: the target whose rows these are.
        unfinished: bool [N], the items that have anything to generate; None means all of them.
            The others are never given a row.
        followers: targets of the same items and row stores; see ``follow``.
    """

    def __init__(
        self,
        target: Target,
        unfinished: np.ndarray | None = None,
        followers: Iterable[Target | RowStore] = (),
    ):
        self.device = target.device
        self.targets: list[Any] = [target]
        self.stores: list[RowStore] = []
        self.follow(*followers)
        self.items = np.arange(target.rows)
        waiting = np.arange(target.rows, target.items)
        if unfinished is not None:
            waiting = waiting[unfinished[waiting]]
        self._waiting = waiting
        self.branches = np.zeros(len(self.items), dtype=np.int64)
        self._next_branch = np.ones(target.items, dtype=np.int64)
        self.rows: Tensor = to_device(self.items, self.device)
        if unfinished is not None:
            self.retire(~unfinished[: target.rows])

    def __len__(self) -> int:
        """Count the rows that are left."""
        return len(self.items)

    def follow(self, *followers: Target | RowStore) -> None:
        """Attach targets of the same items and row stores, which take part in every change.

        Args:
            followers: a target has as many rows as this batch, of the same items.
        """
        for follower in followers:
            if isinstance(follower, RowStore):
                self.stores.append(follower)
            else:
                self.targets.append(follower)

    def retire(self, done: np.ndarray) -> SlotChange | None:
        """Free the rows ``done`` (bool [b]): the first ones take waiting items, the others leave.

        Returns:
            The change, or None where no row is done.
        """
        free = done.nonzero()[0]
        if not len(free):
            return None
        free = free[: len(self._waiting)]
        replaced = kept = None
        if len(free):
            following, self._waiting = self._waiting[: len(free)], self._waiting[len(free) :]
            self.items, self.branches = self.items.copy(), self.branches.copy()
            self.items[free], self.branches[free] = following, 0
            replaced = RowSelection(free, len(done))
            self._replace(replaced, following)
        left = ~done
        left[free] = True
        if not left.all():
            kept = RowSelection(left)
            self.items, self.branches = self.items[left], self.branches[left]
            if len(self.items):  # the last rows need not follow: nothing looks at them again
                self._select(kept)
        self.rows = to_device(self.items, self.device)
        return SlotChange(replaced, kept)

    @property
    def waiting(self) -> np.ndarray:
        """Items that wait for a row, int64 [n], the next one first."""
        return self._waiting

    def wait(self, items: np.ndarray) -> None:
        """Let these items alone wait for a row, int64 [n], the next one first."""
        self._waiting = items

    def grow(self, size: int) -> SlotChange | None:
        """Give waiting items rows of their own, until the batch has ``size`` rows.

        Returns:
            The change, whose ``kept`` rows are copied first and ``replaced`` after it; None where
            nothing waits or the batch is large enough.
        """
        count = min(size - len(self), len(self._waiting))
        if count <= 0:
            return None
        following, self._waiting = self._waiting[:count], self._waiting[count:]
        # a new row is a copy of the first one until it is reset
        before = len(self)
        numbers = np.concatenate([np.arange(before), np.zeros(count, dtype=np.int64)])
        grown = RowSelection(numbers, max(before, 1))
        for target in self.targets:
            target.keep(grown.index_on(target.device))
        for store in self.stores:
            store.select(grown)
        self.items = np.concatenate([self.items, following])
        self.branches = np.concatenate([self.branches, np.zeros(count, dtype=np.int64)])
        replaced = RowSelection(np.arange(before, before + count), before + count)
        self._replace(replaced, following)
        self.rows = to_device(self.items, self.device)
        return SlotChange(replaced, grown)

    def fork(self, rows: np.ndarray, copies: int) -> SlotChange:
        """Copy rows within their items, cache and state included.

        A row's own branch goes on as before; each copy is a new branch of the item, and draws
        differently with ``rng``.

        Args:
            rows: rows to copy, bool [b].
            copies: rows that each of them becomes, at least 1.

        Returns:
            The change; copies stand behind their row.
        """
        return self.reorder(np.repeat(np.arange(len(rows)), np.where(rows, copies, 1)))

    def reorder(self, rows: np.ndarray) -> SlotChange:
        """Make the batch of these rows, in this order.

        A number that comes again is a copy, cache and state included: a new branch of its item. A
        number that does not come is a row that is dropped; no waiting item replaces it.

        Args:
            rows: numbers of the present rows, int64 [n], n at least 1.
        """
        is_copy = np.ones(len(rows), dtype=bool)
        is_copy[np.unique(rows, return_index=True)[1]] = False
        branches, items = self.branches[rows], self.items[rows]
        for row in is_copy.nonzero()[0]:
            branches[row] = self._next_branch[items[row]]
            self._next_branch[items[row]] += 1
        return self._gather(RowSelection(rows, len(self)), branches)

    def continue_as(self, rows: np.ndarray, items: np.ndarray) -> SlotChange:
        """Make the batch of copies of these rows, each as an item of its own.

        Args:
            rows: numbers of the present rows, int64 [n], which may repeat; n may be 0.
            items: item that each copy goes on as, int64 [n]. It has the prompt of the row's item.
        """
        selection = RowSelection(rows, len(self))
        self.items, self.branches = items, np.zeros(len(items), dtype=np.int64)
        self.rows = to_device(items, self.device)
        if len(items):  # as in ``retire``: nothing looks at the last rows again
            for target in self.targets:
                target.keep(selection.index_on(target.device))
                target.rename(items)
            for store in self.stores:
                store.select(selection)
        return SlotChange(None, selection)

    def prune(self, rows: np.ndarray) -> SlotChange:
        """Drop rows (bool [b]) within their items, such as branches that scored low.

        No waiting item replaces them, and at least one row must be left.
        """
        kept = RowSelection(~rows)
        return self._gather(kept, self.branches[kept.numbers])

    def rng(self, rng: CounterRNG) -> CounterRNG:
        """Key random decisions by (item, branch): its row i is row i of the batch.

        Args:
            rng: has one key per item. A row of branch 0 draws as its item does there.
        """
        return rng.of_branches(self.items, self.branches)

    def _gather(self, rows: RowSelection, branches: np.ndarray) -> SlotChange:
        self.items, self.branches = self.items[rows.numbers], branches
        self.rows = to_device(self.items, self.device)
        for target in self.targets:
            target.keep(rows.index_on(target.device))
        for store in self.stores:
            store.select(rows)
        return SlotChange(None, rows)

    def _replace(self, rows: RowSelection, items: np.ndarray) -> None:
        for target in self.targets:
            target.replace(rows.mask_on(target.device), to_device(items, target.device))
        for store in self.stores:
            store.reset(rows)

    def _select(self, rows: RowSelection) -> None:
        for target in self.targets:
            target.keep(rows.mask_on(target.device))
        for store in self.stores:
            store.select(rows)
