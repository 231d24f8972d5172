"""What a run says while it works: bars on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any


class Silent:
    """Says nothing; what the Python API uses."""

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        """``total`` items, or whatever ``unit`` says, of which ``done`` were there already."""

    def batch(self, label: str, rows: int) -> None:
        """A microbatch of ``rows`` items begins."""

    def step(self, info: dict[str, Any]) -> None:
        """One forward call: ``step``, ``done`` and ``total`` tokens. Passed to the sampler as its callback."""

    def items(self, count: int) -> None:
        """``count`` items are finished."""

    def note(self, text: str) -> None:
        """Something worth knowing happened, such as a failed item."""

    def close(self) -> None:
        pass


class Lines(Silent):
    """One line per ``every`` seconds, for log files and pipes."""

    def __init__(self, every: float = 5.0):
        self.every, self.label = every, ""

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        self.total, self.done, self.unit, self.began, self.said = total, done, unit, time.monotonic(), 0.0
        self.note(f"{total} {unit}s" + (f", {done} done already" if done else ""))

    def batch(self, label: str, rows: int) -> None:
        self.label = label

    def items(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.done == self.total or now - self.said >= self.every:
            self.said = now
            self.note(f"{self.done}/{self.total} {self.unit}s, {self.label}, {now - self.began:.1f} s")

    def note(self, text: str) -> None:
        print(f"gen: {text}", file=sys.stderr, flush=True)


class Bars(Silent):
    """An outer bar of items and an inner one of the tokens of the microbatch at work."""

    def __init__(self) -> None:
        self.outer = self.inner = None

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        from tqdm import tqdm

        self.outer = tqdm(total=total, initial=done, unit=unit, file=sys.stderr, dynamic_ncols=True)

    def batch(self, label: str, rows: int) -> None:
        from tqdm import tqdm

        self._end_inner()
        self.outer.set_description(label)
        self.inner = tqdm(total=0, unit="token", leave=False, position=1, file=sys.stderr, dynamic_ncols=True)

    def step(self, info: dict[str, Any]) -> None:
        if self.inner is not None:
            self.inner.total = info["total"]
            self.inner.set_postfix(calls=info["step"], refresh=False)
            self.inner.update(info["done"] - self.inner.n)

    def items(self, count: int) -> None:
        self._end_inner()
        self.outer.update(count)

    def note(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(f"gen: {text}", file=sys.stderr)

    def close(self) -> None:
        self._end_inner()
        if self.outer is not None:
            self.outer.close()

    def _end_inner(self) -> None:
        if self.inner is not None:
            self.inner.close()
            self.inner = None


def for_terminal() -> Silent:
    return Bars() if sys.stderr.isatty() else Lines()
