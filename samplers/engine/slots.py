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


class BatchSlots:
    """Rows of a batch and the items they hold.

    Attributes:
        items: int64 [b], the item of each row; an array that is never written to.
        rows: the same on the target's device, long [b].

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
            (self.stores if isinstance(follower, RowStore) else self.targets).append(follower)

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
            self.items = self.items.copy()
            self.items[free] = following
            replaced = RowSelection(free, len(done))
            self._replace(replaced, following)
        left = ~done
        left[free] = True
        if not left.all():
            kept = RowSelection(left)
            self.items = self.items[left]
            if len(self.items):  # the last rows need not follow: nothing looks at them again
                self._select(kept)
        self.rows = to_device(self.items, self.device)
        return SlotChange(replaced, kept)

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
