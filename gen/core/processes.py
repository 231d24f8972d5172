"""Names of processes: machine, start time, and a check for dead ones."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path

import psutil


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    try:
        return len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS does not tell
        return os.cpu_count() or 1


@lru_cache
def host() -> str:
    """Return a name of the scope in which process numbers are unique: host, boot and process name
    space."""
    parts = [socket.gethostname()]
    # psutil knows neither of them; its boot time moves with the clock
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            continue  # not on this system
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def started(pid: int) -> int:
    """Return the start of a process in hundredths of a second since boot, which tells processes of
    a reused number apart; 0 where unknown, -1 for an ended process that is not yet reaped."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return -1
        # psutil counts from the epoch; a clock that is set between the calls moves boot and start
        while True:
            boot, begin = psutil.boot_time(), process.create_time()
            if boot == psutil.boot_time():
                return round(100 * (begin - boot))
    except psutil.Error:
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
        if not psutil.pid_exists(pid):
            return True
    except OverflowError:  # beyond the numbers of any system
        return True
    # without its start a number may be another process
    return started(pid) != since if since else None
