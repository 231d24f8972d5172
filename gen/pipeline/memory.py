"""Batches that shrink when memory runs out, for calls of a pipeline and for jobs alike.

Every item has random numbers of its own, so smaller batches give the same results.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Self, TypeVar

from gen.core.errors import GenError
from gen.core.memory import is_out_of_memory

T = TypeVar("T")


class BatchSizes:
    """Largest batch sizes that fit into memory, by kind of item and length.

    A size that ran out of memory at one length is not tried at a greater one.
    """

    def __init__(self) -> None:
        self._largest: dict[tuple[Hashable, int], int] = {}

    def of(self, kind: Hashable, length: int, requested: int) -> int:
        """Return the batch size to try: ``requested``, or less where more ran out of memory."""
        limits = [n for (k, at), n in self._largest.items() if k == kind and at <= length]
        return min([requested, *limits])

    def lower(self, kind: Hashable, length: int, tried: int) -> int:
        """Halve the size that ran out of memory and return the new limit, at least 1."""
        self._largest[kind, length] = max(1, tried // 2)
        return self._largest[kind, length]


class Attempt(Generic[T]):
    """Context in which a batch is decoded. Its body sets ``result``.

    ``GenError`` and ``OSError`` go through: a wrong value or a broken disk, which fewer items would
    not mend.

    Attributes:
        result: result of the batch; None where it failed.
        error: error of the batch; None where there was none.
        out_of_memory: True where memory ran out. The error has no traceback then, which would keep
            tensors alive; ``free_memory`` gives them back.
    """

    result: T | None = None
    error: Exception | None = None
    out_of_memory: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        # errors of a model are open
        if not isinstance(error, Exception) or isinstance(error, (GenError, OSError)):
            return False
        self.error, self.out_of_memory = error, is_out_of_memory(error)
        if self.out_of_memory:
            error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        return True
