"""Clocks of a job's parts and of its memory: they wrap the core's own functions, without a profiler
and without a second code path.

A part includes the parts inside it (``commit`` includes ``encode``), and parts in the writer's
thread run beside those in the worker's.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any

import psutil

from gen.jobs.progress.report import Silent

PARTS = {
    "plan": (
        "gen.jobs.run:make_plan",
        "gen.jobs.run:keep_rows",
        "gen.jobs.run:write_plan",
        "gen.jobs.run:open_folder",
    ),
    "commit": ("gen.jobs.writer:Writer._commit",),
    "tar": ("gen.jobs.worker:commit_shard",),
    "journal": ("gen.store.ledger:Journal.add",),
    "fsync": ("os:fsync",),
    "preview": ("gen.gallery.write:preview_of",),
    "publish": ("gen.jobs.worker:publish", "gen.jobs.run:publish"),
    "gallery": ("gen.gallery.write:write_gallery",),
}


@dataclass
class Part:
    """Cost of a part: ``seconds`` of a steady clock and ``cpu`` seconds of the thread in ``calls``
    calls."""

    seconds: float = 0.0
    cpu: float = 0.0
    calls: int = 0


class Clock:
    """Clock that adds up the cost of each part. ``with clock.running():`` wraps the functions and
    restores them at its end."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = defaultdict(Part)
        self._lock = Lock()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(part, time.perf_counter() - began, time.thread_time() - cpu)

        return clocked

    def add(self, part: str, seconds: float, cpu: float) -> None:
        with self._lock:
            found = self.parts[part]
            found.seconds, found.cpu, found.calls = (
                found.seconds + seconds,
                found.cpu + cpu,
                found.calls + 1,
            )

    @contextmanager
    def running(self, modality: Any) -> Iterator[Clock]:
        """Clock `PARTS` and, as ``encode``, saving by the modality."""
        with ExitStack() as stack:
            for part, positions in PARTS.items():
                for position in positions:
                    stack.enter_context(self._around(*_owner(position), part))
            for name in ("save", "save_also"):
                stack.enter_context(self._around(modality, name, "encode"))
            yield self

    @contextmanager
    def _around(self, owner: Any, name: str, part: str) -> Iterator[None]:
        own, before = vars(owner).get(name), getattr(owner, name)
        setattr(owner, name, self.timed(part, before))
        try:
            yield
        finally:
            if own is None:  # it was the class's
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _owner(position: str) -> tuple[Any, str]:
    module, _, path = position.partition(":")
    *classes, name = path.split(".")
    owner = import_module(module)
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


class Marks(Silent):
    """Progress of a run that notes the number of items and the resident memory each ``every``
    items, and the time of the first."""

    def __init__(self, every: int):
        self.every, self.made, self.marks, self.first = every, 0, [], None
        self.began = time.perf_counter()

    def items(self, count: int, *, failed: int = 0, nfe: float = 0.0) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.began
        before, self.made = self.made, self.made + count
        if self.made // self.every > before // self.every:
            self.marks.append((self.made, resident()))

    @property
    def growth(self) -> int | None:
        """Return the bytes between the first mark and the last."""
        return self.marks[-1][1] - self.marks[0][1] if len(self.marks) > 1 else None


def resident() -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss
