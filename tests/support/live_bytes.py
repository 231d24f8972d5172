"""A meter of live tensors: the bytes of all storages that were made while it is on and that
something still holds.

Storages count, not tensors: a view costs nothing, an operation in place costs nothing, and a
storage is gone when the last tensor on it is. What operators use inside themselves and give back
before they return is not seen, nor is what existed before, nor are arrays that numpy made, unless a
tensor is made of one; so the figure is that of the Python code on top of the operators, the same on
every machine, to the byte.

    with LiveBytes() as meter:
        ...
    meter.peak                  the most bytes that lived at once, after any operator
    print(meter.largest(5))     what lived then: bytes, how many, shape, dtype, operator, the line
                                that asked for it
    print(meter.above(n))       all lines of which an operator left more than n bytes alive, with
                                the most: what else there is to mend
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LIFTS = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift.default,
)  # their argument is new: numbers that became a tensor
ABOVE = (
    f"{Path(torch.__file__).parent}/",
    __file__,
    "<",
)  # frames of these say nothing about who asked


@dataclass
class Block:
    """A storage, and the first tensor on it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    line: str

    def __str__(self) -> str:
        return f"{list(self.shape)!s:<20} {str(self.dtype)[6:]:<9} {self.op:<28} {self.line}"


class LiveBytes(TorchDispatchMode):
    """See the module. ``current`` and ``peak``: bytes; ``at_peak``: the blocks that lived when the
    peak was reached."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.peak = 0, 0
        self.at_peak: list[Block] = []
        self._most: dict[str, int] = {}  # bytes after an operator, by the line that asked for it
        self._live: dict[
            int, Block
        ] = {}  # by the address of the storage, which no other has while it lives

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        old = (
            set()
            if func in LIFTS
            else {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        )
        out, line = func(*args, **kwargs), _line()
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._see(x, func, old, line)
        self._most[line] = max(self._most.get(line, 0), self.current)
        if self.current > self.peak:
            self.peak, self.at_peak = self.current, [Block(**vars(b)) for b in self._live.values()]
        return out

    def _see(self, x: Tensor, func, old: set[int], line: str) -> None:
        storage = _storage(x)
        key, size = storage._cdata, storage.nbytes()
        block = self._live.get(key)
        if block is not None:  # it may have grown in place
            self.current += size - block.bytes
            block.bytes = size
        elif key not in old:
            self._live[key] = Block(
                size, tuple(x.shape), x.dtype, str(func).removeprefix("aten."), line
            )
            self.current += size
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.current -= self._live.pop(key).bytes

    def largest(self, count: int = 10) -> str:
        """The largest blocks at the peak, equal ones on one line, and the sum of the others."""
        alike: dict[str, list[int]] = {}
        for block in self.at_peak:
            alike.setdefault(str(block), []).append(block.bytes)
        lines = sorted(alike.items(), key=lambda item: -sum(item[1]))
        rest = sum(sum(sizes) for _, sizes in lines[count:])
        return "\n".join(
            [
                *(f"{sum(sizes):>12,}  {len(sizes):>3} x {said}" for said, sizes in lines[:count]),
                f"{rest:>12,}  all others",
            ]
        )

    def above(self, limit: float) -> str:
        """The lines after which more than ``limit`` bytes lived, with the most of each, the highest
        first."""
        return "\n".join(
            f"{most:>12,}  {line}"
            for line, most in sorted(self._most.items(), key=lambda item: -item[1])
            if most > limit
        )


def _storage(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def _line() -> str:
    """Who asked for it: the innermost line that is not torch's, as ``file.py:12``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ABOVE):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
