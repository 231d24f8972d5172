"""Calls in another process, within bounds of time and memory, that end when nobody waits for them.

    worker = Worker("gen.constraints.worker:prepare")
    with worker.connect() as connection:
        result = connection.call(Call("gen.constraints.worker:answer", data, 2.0, 256.0))

The process is ``gen.core.worker_process``. A thread that waits for it does not hold the
interpreter, so that forward passes of other requests go on.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gen.core import worker_process
from gen.core.worker_process import BEGUN, GRACE, LENGTH, Call

POLL = 0.05  # seconds between looks at a request that may have been given up
STARTING = 60.0  # seconds in which the process must begin
ENVIRONMENT = {  # one thread, and no address space of further arenas
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
Interrupted = Callable[[], Exception | None]


class Exceeded(Exception):
    """Call that took more than its bounds.

    Attributes:
        limit: ``seconds`` or ``megabytes``.
    """

    def __init__(self, limit: str):
        super().__init__(limit)
        self.limit = limit


class Worker:
    """Process that runs calls, started when it is first needed.

    Args:
        prepare: ``module:name`` of a function without arguments that imports what calls need.
    """

    def __init__(self, prepare: str):
        self.prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Number of the process; None where it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process where it does not run; it needs some tenths of a second."""
        with self._lock:
            self._start()

    def connect(self) -> Connection:
        """Return a connection to a process of its own. One that died is started again."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._hand_over(theirs)
        ours.settimeout(POLL)
        return Connection(ours)

    def close(self) -> None:
        """End the process, and with it all that it runs."""
        with self._lock:
            self._forget_of_another()
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
        self._forget_of_another()
        if self._process is not None and self._process.poll() is None:
            assert self._control is not None, "a process that runs has a socket"
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        command = [sys.executable, "-m", worker_process.__name__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, self.prepare],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the process that waits
            )
        return self._control

    def _forget_of_another(self) -> None:
        """Leave the process of a parent to it: this one was forked from there."""
        if self._owner == os.getpid():
            return
        if self._process is not None:
            self._process.returncode = 0  # no child of this process
        if self._control is not None:
            self._control.close()
        self._owner, self._process, self._control = os.getpid(), None, None

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


class Connection(AbstractContextManager["Connection"]):
    """Connection to a process that takes calls one after the other and keeps what they leave.

    It is closed by a call that exceeds its bounds or is interrupted.
    """

    def __init__(self, ours: socket.socket):
        self._socket: socket.socket | None = ours
        self._owner = os.getpid()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether calls can be made; a process that was forked from this one cannot."""
        return self._socket is not None and self._owner == os.getpid()

    def close(self) -> None:
        """Close the connection, which ends the process behind it."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def call(self, call: Call, interrupted: Interrupted = lambda: None) -> Any:
        """Run a call and return its result.

        Args:
            call: the call.
            interrupted: returns an error that ends the call, None while it goes on.

        Raises:
            Exceeded: the call took more than its bounds.
            RuntimeError: the process does not start, or the call failed; with its traceback.
            Exception: what the call raised, if that is a ``GenError``, or ``interrupted`` returned.
        """
        assert self._socket is not None, "the connection is open"
        result: Any
        try:
            answer = _Answer(self._socket, call, interrupted)
            data = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
            answer.send(LENGTH.pack(len(data)) + data)
            result = pickle.loads(answer.read())
        except BaseException:
            self.close()
            raise
        if isinstance(result, Exception):
            raise result
        return result


class _Answer:
    """Answer of the process to one call, read until its time is over or nobody waits for it."""

    def __init__(self, connection: socket.socket, call: Call, interrupted: Interrupted):
        self.connection, self.call, self.interrupted = connection, call, interrupted
        self.begun: float | None = None
        self.until = time.monotonic() + STARTING

    def send(self, data: bytes) -> None:
        """Send the call."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.connection.send(left) :]
            except TimeoutError:
                self._check()
            except OSError:
                raise self._ended() from None

    def read(self) -> bytes:
        """Return the result. Raises ``Exceeded`` where the process ended before it."""
        assert self._exactly(len(BEGUN)) == BEGUN, "the first byte says that it begins"
        self.begun = time.monotonic()
        self.until = self.begun + self.call.seconds + 2 * GRACE
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
            raise Exceeded("seconds")

    def _ended(self) -> Exception:
        """Return the error of a process that ended without a result: the kernel ends it when its
        time is over, and C code ends it where there is no memory."""
        if self.begun is None:
            return RuntimeError("the process that runs calls within bounds does not start")
        spent = time.monotonic() - self.begun
        return Exceeded("seconds" if spent >= self.call.seconds else "megabytes")
