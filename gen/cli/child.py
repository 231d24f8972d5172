"""Command ``gen`` in a process that does not outlive its parent: ``python -m gen.cli.child PARENT
COMMAND ...``.

A parent that is killed (kill -9, out of memory) can tell nobody, so the child looks: once the
system gives it another parent it stops as if asked to, finishing its microbatch, and ends by
force if that takes longer than ``GRACE`` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from gen.__main__ import main as gen
from gen.jobs.signals import STOPPED

LOOK, GRACE = 0.5, 30.0  # seconds


def follow(parent: int, grace: float = GRACE) -> None:
    """Wait for the end of the process ``parent``, then end this one."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(STOPPED)


def main(argv: Sequence[str]) -> int:
    """Run ``gen`` with the arguments behind the parent's process number; return the exit code."""
    threading.Thread(
        target=follow, args=(int(argv[0]),), daemon=True, name="gen-follow-parent"
    ).start()
    return gen(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
