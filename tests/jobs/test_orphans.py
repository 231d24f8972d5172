"""A worker whose parent is killed ends within seconds, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

# A parent that starts a worker as the engine does, says its number, and waits to be killed.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], {parent}], stdin={stdin})
print(child.pid, flush=True)
time.sleep(600)
"""
# A worker that hears no SIGTERM: its microbatch never ends.
CHILD = """
import signal, sys, threading, time
from gen.cli import child
signal.signal(signal.SIGTERM, signal.SIG_IGN)
thread = threading.Thread(target=child.follow, args=(int(sys.argv[1]), 1.0))
thread.start()
print("ready", flush=True)
time.sleep(600)
"""


def seconds_until_the_end(stdin, parent="str(__import__('os').getpid())"):
    line = [sys.executable, "-c", PARENT.format(stdin=stdin, parent=parent), CHILD]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    while time.monotonic() - began < 20 and process.stdout.read(1):
        pass
    try:
        while time.monotonic() - began < 8:
            os.kill(worker, 0)
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("stdin", ["subprocess.PIPE", "subprocess.DEVNULL"])
def test_a_worker_ends_soon_after_its_parent_was_killed(stdin):
    assert seconds_until_the_end(stdin) < 6


def test_the_end_of_the_pipe_alone_tells():
    """As where the system gives an orphan no other parent, or the number of its parent is used
    again: here the worker is told its own one."""
    line = [sys.executable, "-c", CHILD, str(os.getpid())]
    worker = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    worker.stdin.close()
    assert worker.wait(15) == 75
