"""Constraints that are built in another process, which ends when nobody waits for them any more.

The process is ``gen.constraints.worker``. A thread that builds waits for it without holding the
interpreter, so that forward passes of other requests go on.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gen.constraints.budget import Budget, Limits
from gen.constraints.build import limits_of, read
from gen.constraints.kind import Context
from gen.constraints.worker import BEGUN, GRACE, LENGTH, packed, shared
from gen.contracts.constraint import Constraint

POLL = 0.05  # seconds between looks at a request that may have been given up
STARTING = 30.0  # seconds in which the process must begin
ENVIRONMENT = {  # one thread, and no address space of further arenas
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
Interrupted = Callable[[], Exception | None]


class BuilderProcess:
    """Process that builds constraints, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process where it does not run; it needs some tenths of a second."""
        with self._lock:
            self._start()

    def build(
        self,
        structured: Mapping[str, Any],
        text: str | None,
        context: Context,
        most: Limits | None,
        interrupted: Interrupted,
    ) -> Constraint:
        """Build a constraint; arguments as of ``gen.constraints.build.built``.

        Args:
            structured: the rule.
            text: the same as JSON; None where it is none.
            context: model and request.
            most: what building may take; None takes the usual limits, and rules may state others.
            interrupted: returns the error that ends the construction, None while it goes on.

        Raises:
            GenError: see there.
        """
        read(structured)
        limits = limits_of(structured, most)
        job = {
            "rule": dict(structured) if text is None else text,
            "context": replace(context, legal=np.zeros((0, 0), bool)),
            "legal": packed(context.legal),
            "most": most,
        }
        data = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        budget = Budget(limits, next(key for key in structured if key != "budget"), most)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(POLL)
            answer = _Answer(ours, budget, interrupted)
            answer.send(LENGTH.pack(len(data)) + data)
            payload = answer.read()
        result = _loaded(payload, context)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process, and with it all that it builds."""
        with self._lock:
            if self._process is None or self._control is None:
                return
            self._control.close()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = self._control = None

    def _start(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            assert self._control is not None, "a process that runs has a socket"
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__.replace("process", "worker"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the process that waits
            )
        return self._control

    def _hand_over(self, connection: socket.socket) -> None:
        """Give the process its end of a connection; a process that died is started again."""
        with self._lock:
            for last in (False, True):
                try:
                    socket.send_fds(self._start(), [b"\0"], [connection.fileno()])
                    return
                except OSError:
                    if last:
                        raise
                    assert self._process is not None, "it was started above"
                    self._process.kill()
                    self._process.wait()


class _Answer:
    """Answer of the process to one job, read until the budget is over or nobody waits for it."""

    def __init__(self, connection: socket.socket, budget: Budget, interrupted: Interrupted):
        self.connection, self.budget, self.interrupted = connection, budget, interrupted
        self.begun: float | None = None
        self.until = time.monotonic() + STARTING

    def send(self, data: bytes) -> None:
        """Send the job."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.connection.send(left) :]
            except TimeoutError:
                self._check()
            except OSError:
                raise self._ended() from None

    def read(self) -> bytes:
        """Return the result. Raises ``GenError`` where the process ended before it."""
        assert self._exactly(len(BEGUN)) == BEGUN, "the first byte says that it begins"
        self.begun = time.monotonic()
        self.until = self.begun + self.budget.limits.seconds + 2 * GRACE
        size = LENGTH.unpack(self._exactly(LENGTH.size))[0]
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self.connection.recv(min(size - len(found), 1 << 20))
            except TimeoutError:
                self._check()
                continue
            except OSError:
                part = b""
            if not part:
                raise self._ended()
            found += part
        return bytes(found)

    def _check(self) -> None:
        error = self.interrupted()
        if error is not None:
            raise error
        if time.monotonic() > self.until:
            raise self.budget.exceeded("seconds")

    def _ended(self) -> Exception:
        """Return the error of a process that ended without a result: the kernel ends it when its
        time is over, and C code ends it where there is no memory."""
        if self.begun is None:
            return RuntimeError("the process that builds constraints does not start")
        spent = time.monotonic() - self.begun
        return self.budget.exceeded(
            "seconds" if spent >= self.budget.limits.seconds else "megabytes"
        )


def _loaded(payload: bytes, context: Context) -> Any:
    """Return a result of ``gen.constraints.worker.dumped``."""
    known = shared(context)
    unpickler = _Unpickler(io.BytesIO(payload))
    unpickler.known = known
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    """Unpickler that knows objects by name."""

    known: dict[str, Any]

    def persistent_load(self, pid: str) -> Any:
        return self.known[pid]
