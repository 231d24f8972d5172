"""Constraints by their rules: built once at a time, within a budget, and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gen.constraints.budget import BudgetExceeded, Limits
from gen.constraints.build import built, context_of
from gen.constraints.kind import Context
from gen.constraints.process import BuilderProcess
from gen.contracts.constraint import Constraint
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError

if TYPE_CHECKING:
    from gen.core.token_space import TokenSpace

CACHE_BYTES = 32_000_000
REFUSED_SECONDS = 30.0  # that a rule which exceeded its budget is refused without another try
WAITING = 0.05  # seconds between looks at a request that waits for the same rule
Interrupted = Callable[[], Exception | None]


class ConstraintBuilder:
    """Builder of constraints.

    Attributes:
        cache: constraints that were built.

    Args:
        most: what building one may take, and the most that a rule may state under ``budget``; None
            takes the usual limits, and rules may state any.
        process: process that builds; None builds in the thread that asks.
        cache_bytes: memory of the constraints that are kept.
    """

    def __init__(
        self,
        most: Limits | None = None,
        process: BuilderProcess | None = None,
        cache_bytes: int = CACHE_BYTES,
    ):
        self.most, self.process = most, process
        self.cache = ConstraintCache(cache_bytes)
        self._stopped: Exception | None = None
        self._building: dict[Hashable, _Turn] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """A copy of another process begins with nothing built, and builds there."""
        return ConstraintBuilder, (self.most, None, self.cache.most_bytes)

    def build(
        self,
        structured: Mapping[str, Any],
        vocabulary: Vocabulary | None,
        space: TokenSpace,
        left_to_right: bool = True,
        interrupted: Interrupted = lambda: None,
    ) -> Constraint:
        """Return the constraint of a request, of the cache where it is there.

        Args:
            structured: the rule, see ``gen.constraints.build.build``.
            vocabulary: bytes of every token; None where tokens are no text.
            space: positions of a row, allowed tokens and eos tokens.
            left_to_right: whether positions are filled in order.
            interrupted: returns an error that ends the construction, None while it goes on.

        Raises:
            GenError: see there.
        """
        context = context_of(vocabulary, space, left_to_right)
        text = _text_of(structured)
        refused, interrupted = interrupted, lambda: self._stopped or refused()
        if text is None:
            return self._built(structured, text, context, interrupted)
        digest = hashlib.blake2b(np.ascontiguousarray(context.legal), digest_size=16).digest()
        key = (text, id(vocabulary), context.ends, context.legal.shape, left_to_right, digest)
        with self._turn(key, interrupted):
            found = self.cache.get(key)
            if found is None:
                try:
                    found = self._built(structured, text, context, interrupted)
                except BudgetExceeded as error:
                    found = error
                self.cache.put(key, found, vocabulary)
        if isinstance(found, BudgetExceeded):
            raise BudgetExceeded(str(found), found.limit)
        return found

    def start(self) -> None:
        """Start the process, if there is one, before a request waits for it."""
        if self.process is not None:
            self.process.start()

    def stop(self, error: Exception) -> None:
        """End what is built now or later with an error."""
        self._stopped = error

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.close()

    def _built(
        self,
        structured: Mapping[str, Any],
        text: str | None,
        context: Context,
        interrupted: Interrupted,
    ) -> Constraint:
        if self.process is None:
            return built(structured, context, self.most, interrupted)
        return self.process.build(structured, text, context, self.most, interrupted)

    @contextmanager
    def _turn(self, key: Hashable, interrupted: Interrupted) -> Iterator[None]:
        """Wait until nobody else builds the same. Raises what ``interrupted`` returns."""
        with self._lock:
            turn = self._building.setdefault(key, _Turn(threading.Lock()))
            turn.waiting += 1
        try:
            while not turn.lock.acquire(timeout=WAITING):
                error = interrupted()
                if error is not None:
                    raise error
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.waiting -= 1
                if not turn.waiting:
                    del self._building[key]


@dataclass
class _Turn:
    """Lock of one rule, and the number of threads that hold it or wait for it."""

    lock: threading.Lock
    waiting: int = 0


class ConstraintCache:
    """Constraints by key, those that were asked for last. Rules that exceeded their budget are
    kept for some seconds.

    Args:
        most_bytes: memory of all of them.
    """

    def __init__(self, most_bytes: int):
        self.most_bytes, self.nbytes = most_bytes, 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Constraint | BudgetExceeded | None:
        """Return what is kept under a key; None for nothing."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if time.monotonic() > entry.until:
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return entry.found

    def put(self, key: Hashable, found: Constraint | BudgetExceeded, vocabulary: Any) -> None:
        """Keep a constraint or a refusal; the oldest ones go.

        Args:
            key: its key.
            found: what is kept. What is larger than the whole cache is not.
            vocabulary: object whose ``id`` is part of the key.
        """
        is_refusal = isinstance(found, BudgetExceeded)
        until = time.monotonic() + REFUSED_SECONDS if is_refusal else float("inf")
        size = len(str(key)) + (1000 if is_refusal else found.nbytes)
        with self._lock:
            if size > self.most_bytes:
                return
            if key in self._entries:
                self._drop(key)
            self._entries[key] = _Entry(found, size, until, vocabulary)
            self.nbytes += size
            while self.nbytes > self.most_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        self.nbytes -= self._entries.pop(key).size


@dataclass(frozen=True)
class _Entry:
    """What is kept, its bytes, the time until which it counts, and its vocabulary."""

    found: Constraint | BudgetExceeded
    size: int
    until: float
    vocabulary: Any


def _text_of(structured: Mapping[str, Any]) -> str | None:
    """Return a rule as JSON; None where it is none. Raises ``GenError`` for one that is nested too
    deeply."""
    try:
        return json.dumps(structured)
    except RecursionError:
        raise GenError("structured is nested too deeply; expected fewer levels") from None
    except (TypeError, ValueError):  # other types, in a call from Python
        return None
