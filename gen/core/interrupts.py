"""SIGTERM as an interrupt that cannot get lost.

The handler raises ``KeyboardInterrupt``, which Python drops inside of a ``__del__`` and which some
libraries catch while they import others. So it leaves word as well, for what begins afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ASKED = threading.Event()  # a signal has no other way to say that it came


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM interrupt what is inside, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ASKED.clear()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: object) -> None:
    ASKED.set()
    raise KeyboardInterrupt
