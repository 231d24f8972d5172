"""Process that builds constraints: ``python -m gen.constraints.worker FD``.

It imports what building takes, and then forks a process of its own for every constraint, so that
time and memory have a bound that holds in C code too: the limit of its address space, a timer of
the kernel that ends it, and a client whose end of the connection is closed. Nothing that a
construction leaves behind outlives it.

The socket FD brings one connection per constraint. A connection carries a job, then a byte when
the construction begins, then its result. Both are pickles behind their length; of the result, what
the client has already is left out (``shared``). The process ends with its socket.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gen.constraints.budget import MEGABYTE, Limits
from gen.constraints.build import built, limits_of
from gen.constraints.kind import Context
from gen.core.errors import GenError
from gen.core.registry import registry

BEGUN = b"\1"
LENGTH = struct.Struct(">Q")
GRACE = 0.3  # seconds behind the budget, which the construction itself checks
SLACK = 32 * MEGABYTE  # of address space, for what Python and malloc set aside


def main() -> None:
    """Fork a process per connection until the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears ended ones away
    registry.table("constraint")
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not handles:
            return
        if os.fork() == 0:
            control.close()
            try:
                _answer(socket.socket(fileno=handles[0]))
            finally:
                os._exit(0)
        os.close(handles[0])


def _answer(client: socket.socket) -> None:
    """Build the constraint of a connection."""
    job = pickle.loads(_received(client))
    context = replace(job["context"], legal=unpacked(job["legal"], job["context"].vocab_size))
    rule = job["rule"]
    structured = json.loads(rule) if isinstance(rule, str) else rule
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    client.sendall(BEGUN)
    result: Any
    try:
        _bound(limits_of(structured, job["most"]))
        result = built(structured, context, job["most"])
    except GenError as error:
        result = error
    except Exception as error:  # of this package: the client's log names the line
        result = RuntimeError("".join(traceback.format_exception(error)))
    payload = dumped(result, context)
    client.sendall(LENGTH.pack(len(payload)) + payload)


def _bound(limits: Limits) -> None:
    """Bound time and memory of this process, whatever code it runs."""
    signal.setitimer(signal.ITIMER_REAL, limits.seconds + GRACE)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = int(used + limits.megabytes * MEGABYTE + SLACK)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with(client: socket.socket) -> None:
    """End this process when the client closes the connection."""
    client.recv(1)
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


def packed(legal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return allowed tokens, bool [T, V], as distinct rows of bits and the row of each position."""
    bits = np.packbits(legal, axis=1)
    index: dict[bytes, int] = {}
    which = [index.setdefault(row.tobytes(), len(index)) for row in bits]
    _, first = np.unique(which, return_index=True)
    return bits[first], np.array(which)


def unpacked(rows: tuple[np.ndarray, np.ndarray], vocab_size: int) -> np.ndarray:
    """Return what ``packed`` got: bool [T, V]. Equal positions are one row in memory."""
    bits, which = rows
    legal = np.unpackbits(bits, axis=1, count=vocab_size).view(bool)
    if len(legal) == 1:
        return np.broadcast_to(legal, (len(which), vocab_size))
    return legal[which]


def shared(context: Context) -> dict[str, Any]:
    """Return objects that both sides of a connection have, by name."""
    return {"context": context, "legal": context.legal, "vocabulary": context.vocabulary}


def dumped(result: Any, context: Context) -> bytes:
    """Return a result as a pickle without what is shared."""
    names = {id(value): name for name, value in shared(context).items() if value is not None}
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.name_of = lambda value: names.get(id(value))
    pickler.dump(result)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes the names of objects instead of them."""

    name_of: Callable[[Any], str | None]

    def persistent_id(self, obj: Any) -> str | None:
        return self.name_of(obj)


if __name__ == "__main__":
    main()
