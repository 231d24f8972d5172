"""Asking a run to stop: SIGTERM or SIGUSR1 let it finish its microbatch, a second one, or Ctrl-C,
ends it at once.

Schedulers send the one before they take a machine away and the other as an early warning. Either
way nothing finished is lost.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# seconds in which a second signal is the same request: schedulers tell parent and child, and a
# parent tells its children
SAME = 2.0
STOPPED = 75  # the exit code, EX_TEMPFAIL of sysexits.h: the same command goes on later


@contextmanager
def stoppable(note: Callable[[str], None] = lambda text: None) -> Iterator[Callable[[], bool]]:
    """Gives what says whether to stop. Only the main thread can listen to signals; elsewhere it
    never says so."""
    asked, since = threading.Event(), 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal since
        if asked.is_set() and time.monotonic() - since > SAME:
            raise KeyboardInterrupt
        if asked.is_set():
            return
        asked.set()
        since = time.monotonic()
        note(f"{signal.Signals(number).name} received: finishing the microbatch")

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    numbers = [getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n)]
    before = {n: signal.signal(n, ask) for n in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
