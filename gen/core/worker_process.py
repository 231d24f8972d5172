"""Process that runs calls within bounds: ``python -m gen.core.worker_process FD MODULE:NAME``.

It calls the function, which imports what calls need, and then forks a process of its own for every
connection, so that time and memory have a bound that holds in C code too: the limit of its address
space, a timer of the kernel that ends it, and a client whose end of the connection is closed.
Nothing that a call leaves behind outlives its connection.

The socket FD brings connections. A connection carries calls one after the other: a ``Call``, then a
byte when it begins, then its result. Both are pickles behind their length. The process ends with
its socket.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gen.core.errors import GenError

MEGABYTE = 1_000_000
BEGUN = b"\1"
LENGTH = struct.Struct(">Q")
GRACE = 0.3  # seconds behind the limit, for calls that look at their own time
SLACK = 32 * MEGABYTE  # of address space, for what Python and malloc set aside
LOOK = 0.02  # seconds between looks at the memory
STATM = "/proc/self/statm"


@dataclass(frozen=True)
class Call:
    """A call and its bounds.

    Attributes:
        function: ``module:name`` of a function (bytes) -> anything that pickles.
        data: its argument.
        seconds: its time.
        megabytes: memory beyond that of the process when it begins, in millions of bytes.
    """

    function: str
    data: bytes
    seconds: float
    megabytes: float


def main() -> None:
    """Fork a process per connection until the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears ended ones away
    _function(sys.argv[2])()
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not handles:
            return
        if os.fork() == 0:
            control.close()
            try:
                _serve(socket.socket(fileno=handles[0]))
            finally:
                os._exit(0)
        os.close(handles[0])


def _function(name: str) -> Callable[..., Any]:
    """Return a function by ``module:name``."""
    module, _, name = name.partition(":")
    return getattr(import_module(module), name)


def _serve(client: socket.socket) -> None:
    """Run the calls of a connection."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what libraries say before they abort is not for the terminal
        os.dup2(null, stream)
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    unbounded = resource.getrlimit(resource.RLIMIT_AS)
    while True:
        call: Call = pickle.loads(_received(client))
        client.sendall(BEGUN)
        done = threading.Event()
        _bound(call, done)
        result: Any
        try:
            result = _function(call.function)(call.data)
        except GenError as error:
            result = error
        except MemoryError:
            os._exit(0)  # which tells the client
        except BaseException as error:  # panics of Rust are no ``Exception``
            result = RuntimeError("".join(traceback.format_exception(error)))
        done.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, unbounded)
        payload = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        client.sendall(LENGTH.pack(len(payload)) + payload)


def _bound(call: Call, done: threading.Event) -> None:
    """Bound time and memory of this process, whatever code it runs, until the call is ``done``."""
    signal.setitimer(signal.ITIMER_REAL, call.seconds + GRACE)
    if not os.path.exists(STATM):  # elsewhere the time alone is bounded
        return
    most = int(_used() + call.megabytes * MEGABYTE + SLACK)
    threading.Thread(target=_end_above, args=(most, done), daemon=True).start()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most + SLACK, hard))


def _used() -> int:
    """Return the bytes of the address space of this process."""
    with open(STATM) as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _end_above(most: int, done: threading.Event) -> None:
    """End this process above so many bytes: Python 3.11 may loop for ever where the limit of the
    kernel leaves it no memory to raise ``MemoryError`` with."""
    while not done.wait(LOOK):
        if _used() > most:
            os._exit(0)


def _end_with(client: socket.socket) -> None:
    """End this process when the client closes the connection."""
    poll = select.poll()
    poll.register(client, getattr(select, "POLLRDHUP", 0))  # and POLLHUP, which is always told
    poll.poll()
    os._exit(0)


def _received(client: socket.socket) -> bytes:
    size = LENGTH.unpack(_exactly(client, LENGTH.size))[0]
    return _exactly(client, size)


def _exactly(client: socket.socket, size: int) -> bytes:
    """Return so many bytes of a connection; end where it is closed before."""
    found = bytearray(size)
    left = memoryview(found)
    while left:
        count = client.recv_into(left)
        if not count:
            os._exit(0)
        left = left[count:]
    return bytes(found)


if __name__ == "__main__":
    main()
