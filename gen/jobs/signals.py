"""Asking a run to stop: SIGTERM or SIGUSR1 let it finish what it has begun, a second one ends it at
once. So does Ctrl-C, unless the run takes it for such a signal.

Schedulers send the one before they take a machine away and the other as an early warning. Either
way nothing finished is lost.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gen.core.interrupts import ASKED

# seconds in which a second signal is the same request: schedulers tell parent and child, and a
# parent tells its children
SAME = 2.0
STOPPED = 75  # the exit code, EX_TEMPFAIL of sysexits.h: the same command goes on later


@contextmanager
def stoppable(
    note: Callable[[str], None] = lambda text: None,
    work: str = "microbatch",
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
) -> Iterator[Callable[[], bool]]:
    """Gives what says whether to stop. Only the main thread can listen to signals; elsewhere it
    never says so.

    Args:
        note: receives a line when a signal comes.
        work: what is finished then, for the line.
        signals: names of the signals that ask; those that a platform lacks are left out.

    Raises:
        KeyboardInterrupt: a signal came before, and somebody caught its interrupt.
    """
    asked, since = threading.Event(), 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal since
        if asked.is_set() and time.monotonic() - since > SAME:
            raise KeyboardInterrupt
        if asked.is_set():
            return
        asked.set()
        since = time.monotonic()
        note(f"{signal.Signals(number).name} received: finishing the {work}")

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    if ASKED.is_set():  # while what comes before was imported or planned
        raise KeyboardInterrupt
    numbers = [getattr(signal, n) for n in signals if hasattr(signal, n)]
    before = {n: signal.signal(n, ask) for n in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
