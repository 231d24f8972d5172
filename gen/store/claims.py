"""Claims: which worker is at a shard right now.

A claim is a file that only one worker can create. Its worker writes a counter into it from time to
time, the beat. Whether a worker is dead is never a question of what time it is, since clocks jump
and machines disagree: a process of this machine is looked up, and of any other one it is asked
whether its beat has changed within ``stale`` seconds of the observer's own steady clock.

A worker may be stopped for longer than that and go on after a successor has finished the shard.
Two things keep it from spoiling what lies there. It moves files to their names inside
`Claims.fence` only: the last look at the claim and the moves are one step that no take-over
divides, since both hold the lock file of the shard. And every claim of a shard has a higher
``turn`` than the one before it, which the rows carry: a row that comes late counts less than the
successor's.

A worker that is stopped inside the fence, between two moves, keeps its shard until it goes on or
dies. On a file system without locks only the look and the turn are left.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gen.core.clock import SteadyClock
from gen.core.errors import GenError
from gen.core.files import read_regular
from gen.core.processes import is_dead, worker_name
from gen.store.sealed import parse

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

STALE = 60.0  # seconds without a beat after which a worker of another machine counts as dead


@contextmanager
def locked(path: Path, wait: bool = True, create: bool = False) -> Iterator[bool | None]:
    """Lock a folder or a file against other processes; the lock vanishes with the process.

    Args:
        path: the folder or the file.
        wait: wait for another process that has the lock.
        create: create the file if there is none.

    Yields:
        True with the lock, None if another process has it and ``wait`` is false, False where the
            system has no such locks.
    """
    if fcntl is None:
        yield False
        return
    # a network file system locks only what is open for writing, and a folder cannot be
    handle = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            got: bool | None = True
        except BlockingIOError:
            got = None
        except OSError:  # a file system without locks
            got = False
        yield got
    finally:
        os.close(handle)


def create(path: Path, data: bytes) -> bool:
    """Create a file with all of its content; this one step decides between two processes.

    Returns:
        False if the file exists already.
    """
    temporary = path.with_name(f".tmp-{worker_name()}-{threading.get_ident()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            return _create_plainly(path, data)  # a file system without hard links
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _create_plainly(path: Path, data: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def read_claim(path: Path) -> dict[str, Any] | None:
    """Read a claim; ``{}`` if it is torn, None if there is none."""
    try:
        tree = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (GenError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


class Claims:
    """Claims of one worker in ``folder``; leaving the context releases them all.

    Args:
        folder: of the claims of a job.
        worker: name of the worker; this process by default.
        stale: seconds without a beat after which a worker of another machine counts as dead.
        clock: a steady clock.
    """

    def __init__(
        self, folder: Path, worker: str | None = None, stale: float = STALE, clock=time.monotonic
    ):
        self.folder, self.worker, self.stale, self.clock = (
            folder,
            worker or worker_name(),
            stale,
            SteadyClock(clock),
        )
        self.held: set[str] = set()
        self.turns: dict[str, int] = {}  # shard -> number of this worker's claim among all of it
        self._seen: dict[
            str, tuple[Any, float]
        ] = {}  # shard -> what its claim said, and since when
        self._beat, self._lock = 0, threading.Lock()
        self._over, self._thread = threading.Event(), None

    def take(self, shard: str) -> str | None:
        """Claim a shard.

        Returns:
            ``taken``, ``stolen`` (from a dead worker), or None if another worker has it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            how = "taken" if create(self.folder / shard, self._text()) else self._take_over(shard)
        except (
            FileNotFoundError
        ):  # the folder of all claims went away meanwhile, as it does where the job is complete
            return None
        if how is None or not self._take_turn(shard):
            return None
        self._seen.pop(shard, None)
        with self._lock:
            self.held.add(shard)
        return how

    def _take_turn(self, shard: str) -> bool:
        """Count this claim among those of the shard; False if it was taken over already."""
        with self._guard(shard):
            handle = os.open(self._lock_file(shard), os.O_RDWR)
            try:
                before = os.read(handle, 32)
                self.turns[shard] = (int(before) if before.isdigit() else 0) + 1
                os.pwrite(handle, b"%010d" % self.turns[shard], 0)  # no kill halves ten bytes
            finally:
                os.close(handle)
            return self.mine(shard)

    def _take_over(self, shard: str) -> str | None:
        """Replace the claim of a dead worker, one process at a time: of two that find it dead,
        the second would remove the claim of the first."""
        path = self.folder / shard
        with locked(self.folder, wait=False) as free, self._guard(shard, wait=False) as unfenced:
            said = read_claim(path)
            if None in (free, unfenced) or (said is not None and not self._abandoned(shard, said)):
                return None
            path.unlink(missing_ok=True)
            if not create(path, self._text()):
                return None
        return "stolen" if said and said.get("worker") != self.worker else "taken"

    def mine(self, shard: str) -> bool:
        """Return True if the claim is still this worker's: after a long stop another worker may
        have taken the shard over. Raises ``GenError`` for a claim that cannot be read."""
        try:
            said, wrong = parse(read_regular(self.folder / shard))
        except FileNotFoundError:
            return False
        return wrong is None and isinstance(said, dict) and said.get("worker") == self.worker

    @contextmanager
    def fence(self, shard: str) -> Iterator[bool]:
        """Keep other workers from taking the shard over while the context is open.

        Yields:
            True if the claim is still this worker's, and may be written under.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._guard(shard))
            except FileNotFoundError:  # the folder of all claims went away with the finished job
                yield False
                return
            began, mine = self.clock(), self.mine(shard)
            yield mine
            if mine and self.clock() - began > self.stale / 6:
                self._write_beat(shard)  # none could be written meanwhile

    def _guard(self, shard: str, wait: bool = True) -> AbstractContextManager[bool | None]:
        """Lock the shard: what changes its claim, or depends on it, is done by one process at a
        time."""
        return locked(self._lock_file(shard), wait, create=True)

    def _lock_file(self, shard: str) -> Path:
        return self.folder / f"{shard}.lock"

    def release(self, shard: str) -> None:
        """Give a shard back."""
        with self._lock:
            self.held.discard(shard)
        # a disk that takes nothing any more: others find this worker gone when it is
        with suppress(OSError, GenError), self._guard(shard):
            if self.mine(shard):
                (self.folder / shard).unlink(missing_ok=True)

    def beat(self) -> None:
        """Write a new beat into every claim, which tells that this worker lives."""
        with self._lock:
            self._beat += 1
            for shard in self.held:
                # a full disk: the worst that happens is that somebody does the same work
                with suppress(OSError, GenError), self._guard(shard, wait=False) as free:
                    if free is not None and self.mine(shard):
                        self._write_beat(shard)

    def _write_beat(self, shard: str) -> None:
        path = self.folder / shard
        temporary = path.with_name(f".tmp-{self.worker}-{threading.get_ident()}-{shard}")
        try:
            temporary.write_bytes(self._text())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _text(self) -> bytes:
        return json.dumps(
            {
                "worker": self.worker,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "beat": self._beat,
            }
        ).encode()

    def _abandoned(self, shard: str, said: dict[str, Any]) -> bool:
        name = str(said.get("worker"))
        if name == self.worker:  # left by an earlier run in this very process
            return shard not in self.held
        dead = is_dead(name)
        if dead is not None:
            return dead
        last, since = self._seen.get(shard, (None, 0.0))
        now = self.clock()
        if last != said:
            self._seen[shard] = said, now
            return False
        return now - since > self.stale

    def _keep_beating(self) -> None:
        while not self._over.wait(self.stale / 6):
            self.beat()

    def __enter__(self) -> Claims:
        self._thread = threading.Thread(target=self._keep_beating, name="beat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
        for shard in list(self.held):
            self.release(shard)
