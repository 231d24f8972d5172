"""Calls of a model that is split over processes, made by rank 0 and repeated by the others.

A job or a server decides by clocks, claims and requests what it computes next, so not every process
can run it. Rank 0 runs it alone; before each call of an adapter or a cache it tells the other
processes, which make the same call on their part of the model.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gen.core.errors import GenError

IDLE = timedelta(days=365)  # between two calls: a server may wait long


@dataclass(frozen=True)
class Call:
    """One call: method ``name`` of model or cache number ``number``, and its arguments."""

    of_cache: bool
    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class CacheNumber:
    """Stands for a cache in the arguments of a call."""

    number: int


class Messages:
    """Messages from rank 0 to the other processes, in order.

    Caches are numbered in the order in which they are made, on every rank alike.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=IDLE)
        self.lock = threading.RLock()  # of a message with the forward pass that follows
        self._gone: deque[int] = deque()  # caches that nothing on rank 0 refers to
        self._count = 0

    def send(self, message: Any) -> None:
        """Send a message from rank 0."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        dist.broadcast_object_list([(message, gone)], src=0, group=self.group)

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return it with the numbers of caches that are no longer needed."""
        found: list[Any] = [None]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def number(self) -> int:
        """Return the number of the next cache."""
        self._count += 1
        return self._count

    def drop_with(self, cache: Any, number: int) -> None:
        """Let the other processes drop a cache when rank 0 does."""
        weakref.finalize(cache, self._gone.append, number)


class Lead:
    """Rank 0's side of one model or cache that the other processes have too."""

    def __init__(self, messages: Messages, number: int, of_cache: bool = False):
        self.messages, self.number, self.of_cache = messages, number, of_cache

    @contextmanager
    def telling(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Tell the other processes of a call, which is made inside."""
        with self.messages.lock:
            sent = tuple(map(_packed, args)), {k: _packed(v) for k, v in kwargs.items()}
            self.messages.send(Call(self.of_cache, self.number, name, *sent))
            yield

    def owned(self, made: Any) -> Any:
        """Return what a call returned; a cache is led from now on."""
        if isinstance(made, Mirrored):
            made.lead = Lead(self.messages, self.messages.number(), of_cache=True)
            self.messages.drop_with(made, made.lead.number)
        return made


class Mirrored:
    """Base class of what the other processes repeat calls of.

    Attributes:
        lead: rank 0's side; None where every process decides for itself.
    """

    lead: Lead | None = None


def mirrored(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let the other processes of a model repeat the calls of a method of a ``Mirrored``."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.lead is None:
            return method(self, *args, **kwargs)
        with self.lead.telling(method.__name__, args, kwargs):
            return self.lead.owned(method(self, *args, **kwargs))

    return call


class Follower:
    """Models and caches of a process that repeats the calls of rank 0."""

    def __init__(self, messages: Messages, device: torch.device):
        self.messages, self.device = messages, device
        self.models: dict[int, Any] = {}
        self.caches: dict[int, Any] = {}

    def repeat(self, call: Call) -> None:
        """Make a call of rank 0."""
        owner = self.caches[call.number] if call.of_cache else self.models[call.number]
        args = [self._unpacked(x) for x in call.args]
        kwargs = {k: self._unpacked(v) for k, v in call.kwargs.items()}
        try:
            made = getattr(owner, call.name)(*args, **kwargs)
        except GenError:  # rank 0 meets the same error, and says it
            return
        if isinstance(made, Mirrored):
            self.caches[self.messages.number()] = made

    def drop(self, numbers: list[int]) -> None:
        """Drop caches that rank 0 no longer has."""
        for number in numbers:
            self.caches.pop(number, None)

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, CacheNumber):
            return self.caches[value.number]
        return value.to(self.device) if isinstance(value, Tensor) else value


def _packed(value: Any) -> Any:
    """Return an argument as it is sent."""
    if isinstance(value, Mirrored):
        assert value.lead is not None, "a cache of a model that is led"
        return CacheNumber(value.lead.number)
    return value.cpu() if isinstance(value, Tensor) else value
