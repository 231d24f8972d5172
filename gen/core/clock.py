"""Clocks and pauses that survive a system whose clocks jump, as those of a resumed or simulated
machine do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress


class SteadyClock:
    """Seconds that never run backwards: a jump back of the clock below counts as no time.

    Args:
        clock: gives seconds, with any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._seen, self._passed = clock, clock(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the seconds since the clock was made."""
        with self._lock:
            now = self._clock()
            self._passed += max(0.0, now - self._seen)
            self._seen = now
            return self._passed


def pause(seconds: float) -> None:
    """Sleep, or return at once where the clock has jumped out of the range of the system."""
    with suppress(OSError, ValueError):
        time.sleep(max(0.0, seconds))
