"""Names of processes: machine, start time, and a check for dead ones."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    # only Linux tells; elsewhere all of them count
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def host() -> str:
    """Return a name of the scope in which process numbers are unique: host, boot and process name
    space."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            continue  # not on this system
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def started(pid: int) -> int:
    """Return the start time of a process in its system's own count, which tells processes of a
    reused number apart; 0 where unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return 0


def worker_name() -> str:
    """Return the name of this process among all workers: ``1a2b3c4d-4711-123456``."""
    return _name(os.getpid())


@lru_cache(4)
def _name(pid: int) -> str:  # asked for with every file that is written
    return f"{host()}-{pid}-{started(pid)}"


def is_dead(worker: str) -> bool | None:
    """Return True if a worker's process is gone; None for another machine, or for a name that is
    no worker's."""
    parts = worker.split("-")
    if len(parts) != 3 or parts[0] != host() or not all(p.isdigit() for p in parts[1:]):
        return None
    pid, since = int(parts[1]), int(parts[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and somebody else's
        return False
    return (
        started(pid) != since if since else None
    )  # without its beginning a number may be another process
