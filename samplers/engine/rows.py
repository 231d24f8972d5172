"""Rows of a batch: a choice of rows, and a store of state that follows the rows by itself.

The state of a method has one entry per row of the batch. Rows leave the batch when they are
finished, begin anew with another item, or are copied (``gen.samplers.engine.slots``). A method that
keeps its state in a ``RowStore`` needs no code for any of that.

The host always knows which rows a change is about, so no device has to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.samplers.engine.host import to_device

Rows = Tensor | np.ndarray | list | None  # values whose first axis is the rows of the batch


class RowSelection:
    """A choice of rows that the host knows, with copies on every device that asks for one.

    Args:
        rows: bool [b], the chosen rows; or long [n], their numbers, which may repeat.
        size: number of rows b that the choice is made from; needed for numbers alone.
    """

    def __init__(self, rows: np.ndarray, size: int | None = None):
        chosen = rows.dtype == bool
        self.size = len(rows) if chosen else int(size if size is not None else rows.max() + 1)
        self.numbers = rows.nonzero()[0] if chosen else rows
        self._mask = rows if chosen else None
        self._copies: dict[tuple[str, torch.device], Tensor] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def mask(self) -> np.ndarray:
        """Chosen rows as bool [b]."""
        if self._mask is None:
            self._mask = np.zeros(self.size, dtype=bool)
            self._mask[self.numbers] = True
        return self._mask

    def index_on(self, device: torch.device) -> Tensor:
        """Numbers of the chosen rows on a device, long [n]."""
        return self._on("index", self.numbers, device)

    def mask_on(self, device: torch.device) -> Tensor:
        """Chosen rows on a device, bool [b]."""
        return self._on("mask", self.mask, device)

    def _on(self, kind: str, x: np.ndarray, device: torch.device) -> Tensor:
        if (kind, device) not in self._copies:
            self._copies[kind, device] = to_device(x, device)
        return self._copies[kind, device]

    def take(self, x: Any) -> Any:
        """Chosen rows of ``x`` [b, ...], a tensor, an array or a list; None stays None."""
        if x is None:
            return None
        if isinstance(x, Tensor):
            return x[self.index_on(x.device)]
        if isinstance(x, list):
            return [x[row] for row in self.numbers.tolist()]
        return x[self.numbers]

    def fill(self, x: Any, start: Any) -> Any:
        """Copy ``x`` [b, ...] with ``start`` in the chosen rows.

        Args:
            x: tensor, array or list; None stays None.
            start: what a row begins with: a number, a tensor or array of one row's shape, or a
                function that makes it, which a list needs.
        """
        if x is None:
            return None
        value: Any = start() if callable(start) else start
        if isinstance(x, list):
            chosen, make = self.mask.tolist(), start if callable(start) else lambda: start
            return [make() if new else old for old, new in zip(x, chosen, strict=True)]
        shape = (-1, *[1] * (x.ndim - 1))
        if isinstance(x, Tensor):
            mask = self.mask_on(x.device).view(shape)
            if isinstance(value, Tensor):
                return torch.where(mask, value.to(x.dtype), x)
            return x.masked_fill(mask, value)
        return np.where(self.mask.reshape(shape), value, x).astype(x.dtype, copy=False)


class RowStore(MutableMapping[str, Any]):
    """Named state of a method: tensors, arrays or lists whose first axis is the rows.

    ``register`` declares what a row begins with. A name that is set without it has no such value:
    after ``reset``, ``get(name, start)`` gives ``start`` in the rows that are other items now,
    until the name is set again.
    """

    def __init__(self) -> None:
        self._values: dict[str, Rows] = {}
        self._starts: dict[str, Any] = {}
        # rows that hold another item since the name was set, of names that were not registered
        self._stale: dict[str, RowSelection] = {}

    def register(self, name: str, start: Any = None, value: Rows = None) -> None:
        """Declare an entry.

        Args:
            name: key of the entry.
            start: what a row begins with: a number, a tensor or array of one row's shape, or a
                function that makes it; None leaves an old row's content, for entries that another
                one says are not valid.
            value: the entry [b, ...] of today's rows; None until it is set.
        """
        self._starts[name] = start
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        if self._stale:
            self._stale.pop(name, None)

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._starts.pop(name, None)
        self._stale.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Read an entry, with ``default`` [b, ...] where the row is another item since it was set.

        Args:
            name: key of the entry.
            default: value of an entry that was never set, and of rows that began anew.
        """
        if name not in self._values:
            return default
        value, stale = self._values[name], self._stale.get(name)
        if stale is None or value is None:
            return value
        if default is None:
            raise KeyError(f"{name!r} was reset; get() needs the value that a row begins with")
        return _merged(stale, default, value)

    def select(self, rows: RowSelection) -> None:
        """Keep the chosen rows of all entries, in their order; rows may repeat."""
        for name, value in self._values.items():
            self._values[name] = rows.take(value)
        self._stale = {
            name: RowSelection(rows.take(stale.mask)) for name, stale in self._stale.items()
        }

    def reset(self, rows: RowSelection) -> None:
        """Give the chosen rows of all entries what a row begins with: they hold other items."""
        for name, value in self._values.items():
            if name not in self._starts:
                before = self._stale.get(name)
                mask = rows.mask if before is None else rows.mask | before.mask
                self._stale[name] = RowSelection(mask)
            elif self._starts[name] is not None:
                self._values[name] = rows.fill(value, self._starts[name])


def _merged(rows: RowSelection, new: Any, old: Any) -> Any:
    """``old`` [b, ...] with ``new`` [b, ...] in the chosen rows."""
    shape = (-1, *[1] * (old.ndim - 1))
    if isinstance(old, Tensor):
        return torch.where(rows.mask_on(old.device).view(shape), new, old)
    return np.where(rows.mask.reshape(shape), new, old)


class RowOwner:
    """Base of objects whose state has one entry per row of the batch.

    Declare such state as a class attribute, ``name = RowState(start)``. The decoding loop
    attaches ``stores`` to its ``BatchSlots``, and the state follows the rows.
    """

    @cached_property
    def store(self) -> RowStore:
        """State of this object."""
        return RowStore()

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """State of this object and of the parts that it is made of."""
        return (self.store,)


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
        return instance.store.get(self.name)

    def __set__(self, instance: RowOwner, value: Any) -> None:
        store, start = instance.store, self.start
        if self.name not in store:
            store.register(self.name, partial(start, instance) if callable(start) else start)
        store[self.name] = value
