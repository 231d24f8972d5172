"""Calls in a process of their own, with limits of time and memory. Not a test.

A forked process has everything imported, so that hundreds of calls take little time.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from gen.core.errors import GenError

SECONDS, MEMORY = 20.0, 2 << 30


@dataclass
class Ended:
    """How a call ended.

    Attributes:
        how: ``returned``, ``refused`` (GenError), ``failed`` (another exception), ``memory``,
            ``hung`` or ``died``.
        said: the message, or what was returned, as text.
        seconds: how long it took.
    """

    how: str
    said: str
    seconds: float


def bounded(call: Callable[[], object], seconds: float = SECONDS, memory: int = MEMORY) -> Ended:
    """Run a call in a forked process.

    Args:
        call: the call.
        seconds: after which the process is killed.
        memory: bytes that it may have beyond those it was born with.
    """
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reading)
        _run(call, writing, memory)
    os.close(writing)
    parts = b""
    while True:
        left = began + seconds - time.monotonic()
        ready, _, _ = select.select([reading], [], [], max(0.0, left))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reading)
            return Ended("hung", "", time.monotonic() - began)
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts += part
    os.close(reading)
    _, status = os.waitpid(child, 0)
    took = time.monotonic() - began
    if not parts:
        return Ended("died", f"signal {os.waitstatus_to_exitcode(status)}", took)
    return Ended(*pickle.loads(parts), took)


def _run(call: Callable[[], object], writing: int, memory: int) -> None:
    """Run a call in the forked process, send how it ended, and end the process."""
    gc.freeze()  # objects of the parent may end threads that only the parent has
    with open("/proc/self/statm") as file:
        born = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (born + memory, born + memory))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        ended = "returned", repr(call())[:2000]
    except GenError as error:
        ended = "refused", str(error)
    except MemoryError as error:
        ended = "memory", str(error)
    except BaseException as error:
        kind = "memory" if "allocate memory" in str(error) else "failed"
        ended = kind, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    os.write(writing, pickle.dumps(ended))
    os._exit(0)
