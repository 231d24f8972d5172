"""Command ``gen`` in a process that does not outlive its parent: ``python -m gen.cli.child PARENT
COMMAND ...``.

A parent that is killed (kill -9, out of memory) can tell nobody. It holds the other end of the
child's stdin, which the system closes with it, on every platform and at once. Where something else
inherited that end the child still sees that it has another parent. It then stops as if asked to,
and ends by force if its microbatch takes longer than ``GRACE`` seconds.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from math import ceil

from gen.__main__ import main as gen
from gen.jobs.signals import STOPPED
from gen.models.load.libraries import hide_quantizers

LOOK, GRACE = 0.5, 10.0  # seconds


def follow(parent: int, grace: float = GRACE) -> None:
    """Wait for the end of the process ``parent``, then end this one."""
    closed = threading.Event()
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_wait_for_end, args=(closed,), daemon=True).start()
    while os.getppid() == parent and not closed.wait(LOOK):
        pass
    if sys.platform != "win32":
        # the system ends the process where a library keeps this thread from running again
        signal.alarm(ceil(2 * grace))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(STOPPED)


def _wait_for_end(closed: threading.Event) -> None:
    # not sys.stdin: its lock would be held when the interpreter ends
    while os.read(0, 1):
        pass
    closed.set()


def main(argv: Sequence[str]) -> int:
    """Run ``gen`` with the arguments behind the parent's process number; return the exit code."""
    threading.Thread(
        target=follow, args=(int(argv[0]),), daemon=True, name="gen-follow-parent"
    ).start()
    return gen(list(argv[1:]))


if __name__ == "__main__":
    hide_quantizers()
    sys.exit(main(sys.argv[1:]))
