"""Rows of a batch: which item each one holds, and state that follows the rows by itself.

A target may hold fewer rows than it has items (``Target.at_most``). A row that is finished takes
the next waiting item, or leaves the batch where none waits. ``BatchSlots`` decides that, and tells
every target (the model, and a draft or judge model beside it) and every ``RowStore`` that was
attached. The state of a method has one entry per row: a method that keeps it in a ``RowStore``
needs no code for rows that leave, are copied or begin anew with another item. Nothing a row draws
depends on which row of the batch it is.

The host always knows what a change is about, so no device has to be waited for.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gen.samplers.engine.host import to_device

if TYPE_CHECKING:
    from gen.models.targets.base import Target


class SlotChange:
    """Change of the rows of a batch: each is a row of before, and some begin anew.

    Attributes:
        source: the row before that each row is, int64 [n]; a number that comes again is a copy.
            None where all rows stay.
        fresh: rows that hold another item now, bool [n]; None where none does.
    """

    def __init__(self, source: np.ndarray | None = None, fresh: np.ndarray | None = None):
        self.source, self.fresh = source, fresh

    def follow(self, x: Any, start: Any = None) -> Any:
        """Apply the change to the state [b, ...] of the rows before. ``start``: what a row begins
        with, a number or [n, ...]; None leaves what was there."""
        if self.source is not None:
            x = x[to_device(self.source, x.device) if isinstance(x, Tensor) else self.source]
        return x if self.fresh is None or start is None else _begun(x, self.fresh, start)

    def extend(self, x: Any, start: Any) -> Any:
        """Apply the change to the state of a batch that grows, and may have had no row left."""
        if not len(x):  # any row will do: the new ones, which are copies of it, begin anew
            shape = (1, *x.shape[1:])
            x = x.new_zeros(shape) if isinstance(x, Tensor) else np.zeros(shape, dtype=x.dtype)
        return self.follow(x, start)


def _begun(x: Any, fresh: np.ndarray, start: Any) -> Any:
    """Copy ``x`` [b, ...] with ``start`` in the ``fresh`` rows, bool [b]."""
    fresh = fresh.reshape(-1, *[1] * (x.ndim - 1))
    if not isinstance(x, Tensor):
        return np.where(fresh, start, x).astype(x.dtype, copy=False)
    mask = to_device(fresh, x.device)
    return start.where(mask, x) if isinstance(start, Tensor) else x.masked_fill(mask, start)


class RowStore(UserDict[str, Any]):
    """Named state of a method: tensors or arrays whose first axis is the rows, or None.

    What a row begins with is declared in ``starts``, or else given by who reads: after rows have
    begun anew, ``get(name, start)`` has ``start`` there until the entry is set again.

    Attributes:
        starts: by name, what a row begins with: a number or one row's values, or a function that
            gives it. None leaves what was there, where another entry says what is valid.
        fresh: by name, rows that hold another item since the entry was set, bool [b]; of entries
            without a declared start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[str, Any] = {}
        self.fresh: dict[str, np.ndarray] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.data[name] = value
        self.fresh.pop(name, None)

    def get(self, name: str, default: Any = None) -> Any:
        """Read an entry. ``default``: what a row begins with, a number or [b, ...]; an entry that
        was never set. Raises ``KeyError``: rows began anew, and nobody says with what."""
        value = self.data.get(name, default)
        if name in self.fresh and value is not None:
            if default is None:
                raise KeyError(f"{name!r} was reset; get() needs the value that a row begins with")
            value = self.data[name] = _begun(value, self.fresh.pop(name), default)
        return value

    def follow(self, change: SlotChange) -> None:
        """Apply a change of the rows to all entries."""
        if change.source is not None:
            self.fresh = {name: fresh[change.source] for name, fresh in self.fresh.items()}
        for name, value in self.data.items():
            start = self.starts.get(name)
            if value is not None:
                start = start() if callable(start) else start
                self.data[name] = change.follow(value, start)
            if change.fresh is not None and name not in self.starts:
                self.fresh[name] = self.fresh.get(name, False) | change.fresh


class RowOwner:
    """Base of objects whose state has one entry per row of the batch.

    Declare such state as a class attribute, ``name = RowState(start)``. The decoding loop
    attaches ``stores`` to its ``BatchSlots``, and the state follows the rows.

    Attributes:
        made_of: objects that it is made of, whose state follows the rows as well.
    """

    made_of: tuple[RowOwner, ...] = ()

    @cached_property
    def store(self) -> RowStore:
        """State of this object."""
        return RowStore()

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """State of this object and of those that it is made of."""
        return (self.store, *(store for owner in self.made_of for store in owner.stores))


class RowState:
    """Attribute with one entry per row, kept in the store of its ``RowOwner``; None until set.

    Args:
        start: what a row begins with: a number, a function of the owner that gives it, or None for
            content that another entry says is not valid.
    """

    def __init__(self, start: float | Callable[[Any], float] | None = None):
        self.start, self.name = start, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: RowOwner | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.store.data.get(self.name)

    def __set__(self, instance: RowOwner, value: Any) -> None:
        store, start = instance.store, self.start
        if self.name not in store.starts:
            store.starts[self.name] = partial(start, instance) if callable(start) else start
        store[self.name] = value


class BatchSlots:
    """Rows of a batch and the items they hold.

    Attributes:
        items: int64 [b], the item of each row; an array that is never written to.
        rows: the same on the target's device, long [b].
        waiting: items that wait for a row, int64 [n], the next one first.

    Args:
        target: the target whose rows these are.
        unfinished: bool [N], the items that have anything to generate; None means all of them.
            The others are never given a row.
        followers: targets with as many rows of the same items, and row stores: they take part in
            every change.
    """

    def __init__(
        self,
        target: Target,
        unfinished: np.ndarray | None = None,
        followers: Iterable[Target | RowStore] = (),
    ):
        self.device, self.targets, self.stores = target.device, [target], []
        for follower in followers:
            kind: list[Any] = self.stores if isinstance(follower, RowStore) else self.targets
            kind.append(follower)
        self.items = np.arange(target.rows)
        self.rows: Tensor = to_device(self.items, self.device)
        self.waiting = np.arange(target.rows, target.items)
        if unfinished is not None:
            self.waiting = self.waiting[unfinished[self.waiting]]
            self.retire(~unfinished[: target.rows])

    def __len__(self) -> int:
        """Count the rows that are left."""
        return len(self.items)

    def retire(self, done: np.ndarray) -> SlotChange | None:
        """Free the rows ``done`` (bool [b]): the first ones take waiting items, the others leave.
        Returns the change; None where no row is done."""
        free = done.nonzero()[0]
        if not len(free):
            return None
        free = free[: len(self.waiting)]
        items, source, fresh = self.items.copy(), None, None
        if len(free):
            items[free], self.waiting = self.waiting[: len(free)], self.waiting[len(free) :]
            fresh = np.zeros(len(done), dtype=bool)
            fresh[free] = True
        left = ~done
        left[free] = True
        if not left.all():
            source = left.nonzero()[0]
            items, fresh = items[source], None if fresh is None else fresh[source]
        return self._change(SlotChange(source, fresh), items)

    def grow(self, size: int) -> SlotChange | None:
        """Give waiting items rows of their own, until the batch has ``size`` rows. Returns the
        change; None where nothing waits or the batch is large enough."""
        count, before = min(size - len(self), len(self.waiting)), len(self)
        if count <= 0:
            return None
        items = np.concatenate([self.items, self.waiting[:count]])
        self.waiting = self.waiting[count:]
        # a new row is a copy of the first one until it begins anew
        source = np.concatenate([np.arange(before), np.zeros(count, dtype=np.int64)])
        return self._change(SlotChange(source, np.arange(len(source)) >= before), items)

    def continue_as(self, rows: np.ndarray, items: np.ndarray) -> SlotChange:
        """Make the batch of these present rows, int64 [n], n may be 0, cache and state included. A
        number that comes again is a copy; a row whose number does not come is dropped, and no
        waiting item replaces it. Each goes on as an item, int64 [n], that has the prompt of the
        row's item."""
        change = self._change(SlotChange(rows), items)
        for target in self.targets if len(items) else ():
            target.rename(items)
        return change

    def _change(self, change: SlotChange, items: np.ndarray) -> SlotChange:
        self.items, self.rows = items, to_device(items, self.device)
        if len(items):  # the last rows need not follow: nothing looks at them again
            source, fresh = change.source, change.fresh
            for target in self.targets:
                if source is not None:
                    target.keep(to_device(source, target.device))
                if fresh is not None:
                    device = target.device
                    target.replace(to_device(fresh, device), to_device(items[fresh], device))
            for store in self.stores:
                store.follow(change)
        return change
