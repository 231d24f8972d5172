"""Progress of a run on stderr: counts, pace and plain lines.

Nothing here ends a run: writes to a stderr that has gone away are lost. Times are those of a
steady clock, and the remaining time is estimated from the latest items of this very run, not
from those that were there already.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gen.core.clock import SteadyClock
from gen.core.tables import plural


class Silent:
    """Says nothing; what the Python API uses."""

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        """``total`` items, or whatever ``unit`` says, of which ``done`` were there already."""

    def batch(self, label: str, rows: int) -> None:
        """A microbatch begins, of which ``rows`` items are made at a time; 0 where another process
        makes them."""

    def step(self, info: dict[str, Any]) -> None:
        """Report a forward pass: ``step``, ``done`` and ``total`` tokens. The sampler gets this
        method as its callback."""

    def items(self, count: int, *, failed: int = 0, nfe: float = 0.0) -> None:
        """Report ``count`` finished items, ``failed`` of them without an output; ``nfe`` is the sum
        of their forward passes."""

    def again(self, count: int) -> None:
        """``count`` items that were there have to be made again."""

    def note(self, text: str) -> None:
        """Something worth knowing happened, such as a failed item."""

    def close(self) -> None:
        pass


class Pace:
    """Rate of items over the last two minutes or the last twenty items, whichever goes further
    back."""

    SPAN, ENOUGH = 120.0, 20

    def __init__(self, now: float):
        self.marks = deque(
            [(now, 0)]
        )  # when, and how many items there were by then; one mark a second

    def add(self, count: int, now: float) -> None:
        """Count items finished at the time ``now``."""
        marks, made = self.marks, self.marks[-1][1] + count
        if len(marks) > 1 and now - marks[-2][0] < 1:
            marks.pop()
        marks.append((now, made))
        while (
            len(marks) > 2 and now - marks[1][0] >= self.SPAN and made - marks[1][1] >= self.ENOUGH
        ):
            marks.popleft()

    def rate(self) -> float | None:
        """Items per second; ``None`` before there are any."""
        (since, before), (until, made) = self.marks[0], self.marks[-1]
        return (made - before) / (until - since) if made > before and until > since else None

    def left(self, items: int, now: float) -> float | None:
        """Seconds until so many more items are made."""
        rate = self.rate()
        return None if rate is None else max(0.0, items / rate - (now - self.marks[-1][0]))


class Tally(Silent):
    """Counts, and puts into words what there is to say. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.unit, self.label = SteadyClock(clock), "item", ""
        self.total = self.done = self.made = self.failed = self.at_once = 0
        self.nfe, self.inner, self.began = 0.0, {}, None  # inner: what the last forward pass said

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        self.total, self.done, self.unit, self.began = total, done, unit, self.clock()
        self.pace = Pace(self.began)

    def batch(self, label: str, rows: int) -> None:
        self.label, self.at_once = label, rows
        if rows and not self.made:  # loading a model says nothing about how fast items come
            self.pace = Pace(self.clock())

    def step(self, info: dict[str, Any]) -> None:
        self.inner = info

    def items(self, count: int, *, failed: int = 0, nfe: float = 0.0) -> None:
        self.done, self.made = self.done + count, self.made + count
        self.failed, self.nfe = self.failed + failed, self.nfe + nfe
        self.pace.add(count, self.clock())

    def again(self, count: int) -> None:
        self.done -= count

    def words(self) -> dict[str, str]:
        """``count``, ``rate``, ``forwards``, ``failed`` and ``left``, as far as they are known,
        each for people."""
        rate, now = self.pace.rate(), self.clock()
        left = self.pace.left(self.total - self.done, now) if self.done < self.total else None
        good = self.made - self.failed
        return {
            k: v
            for k, v in {
                "count": f"{self.done}/{plural(self.total, self.unit)}",
                "rate": speed(rate, self.unit),
                "forwards": (
                    f"{self.nfe / good:.1f} forward passes/{self.unit}" if self.nfe and good else ""
                ),
                "failed": f"{self.failed} failed" if self.failed else "",
                "left": (
                    f"took {duration(now - self.began)}"
                    if self.done >= self.total
                    else ""
                    if left is None
                    else f"{duration(left)} left"
                ),
            }.items()
            if v
        }


class Lines(Tally):
    """Plain lines, one per ``every`` seconds, for log files and pipes."""

    def __init__(self, every: float = 5.0, clock: Callable[[], float] = time.monotonic):
        super().__init__(clock)
        self.every, self.said, self.told = (
            every,
            0.0,
            0,
        )  # told: items made when the last line was written

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        super().start(total, done, unit)
        self.said, self.told = self.began, 0
        self.note(plural(total, unit) + (f", {done} already done" if done else ""))

    def items(self, count: int, *, failed: int = 0, nfe: float = 0.0) -> None:
        super().items(count, failed=failed, nfe=nfe)
        if self.done >= self.total or self.clock() - self.said >= self.every:
            self._say()

    def step(self, info: dict[str, Any]) -> None:
        super().step(info)
        if (
            self.began is not None and self.clock() - self.said >= 6 * self.every
        ):  # slow items, such as videos
            self._say(
                f"{info['done']}/{info['total']} tokens, {plural(self.at_once, 'item')} at once"
            )

    def note(self, text: str) -> None:
        try:
            print(f"gen: {one_line(text)}", file=sys.stderr, flush=True)
        except (
            OSError,
            ValueError,
            AttributeError,
        ):  # nobody listens any more: no reason to stop working
            pass

    def close(self) -> None:
        if self.made > self.told:  # the run ended early
            self._say()

    def _say(self, more: str = "") -> None:
        self.said, self.told = self.clock(), self.made
        words = self.words()
        self.note(
            ", ".join(x for x in (words.pop("count"), self.label, more, *words.values()) if x)
        )


def speed(rate: float | None, unit: str = "item") -> str:
    """``41.2 items/s``, or ``12.5 s/item`` for slow ones; nothing for ``None``."""
    if rate is None:
        return ""
    if rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    return f"{rate:.0f} {unit}s/s" if rate >= 100 else f"{rate:.1f} {unit}s/s"


def duration(seconds: float) -> str:
    """``0:36``, ``3:12:09``, ``2 days 4 h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def one_line(text: str) -> str:
    """Remove line breaks and control characters, which would move the cursor or colour the rest."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
