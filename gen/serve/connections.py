"""Connections of the server: their number, their pace, answers that nobody reads, and the end.

uvicorn's server with h11, and bounds that it leaves to others: how many connections are open, how
long a head may take, how finely a body may be cut, how long an answer may wait for its reader. A
connection beyond one of them is cut, and the log gets one line.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gen.serve.api.errors import LOG, ApiError, server_ends

if sys.platform != "win32":
    import resource

HEAD_SECONDS = 10.0  # in which the head of a request must arrive, from its connection on
IDLE_SECONDS = 15  # that a connection is kept between requests
UNREAD_SECONDS = 60.0  # in which a client must take LEAST_TAKEN bytes of an answer that waits
CROWDED_SECONDS = 5.0  # the same, while more than CROWDED of the connections are taken
CROWDED = 0.75
LEAST_TAKEN = 16_384
LAST_SECONDS = 10  # that running requests have when the server ends
TOLD_SECONDS = 1.0  # that they have to be told so, after which their connections are cut
LARGEST_HEAD = 32_768  # bytes
MOST_PARTS, LEAST_PART = 256, 64  # parts of a body, and the mean bytes of more than these
BACKLOG = 2_048  # connections that wait to be accepted
ACCEPTED = 64  # connections that are accepted before any of them is answered
WINDOWS_SOCKETS = 500  # that select takes there
RESERVED = 160  # handles that are left for files and for what is accepted


class Connections(ServerState):
    """Connections of a server.

    Attributes:
        refused: connections that were refused since the last look.
        starved: connections that found no handle since then.

    Args:
        most: connections that may be open.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most, self.refused, self.starved = most, 0, 0

    @property
    def patience(self) -> float:
        """Seconds in which a client must take a part of its answer."""
        is_crowded = len(self.connections) > CROWDED * self.most
        return CROWDED_SECONDS if is_crowded else UNREAD_SECONDS

    def look(self) -> None:
        """Cut the connections whose clients read nothing, and tell how many were refused."""
        now, patience = time.monotonic(), self.patience
        for connection in list(self.connections):
            assert isinstance(connection, Http), "the server has no other connections"
            connection.require_reader(now, patience)
        if self.refused:
            LOG.warning("%d connections refused: %d are open", self.refused, self.most)
        if self.starved:
            LOG.warning("%d connections found no handle: the process has no more", self.starved)
        self.refused = self.starved = 0

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what fails for want of handles, and let the loop log anything else."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self.starved += 1
        else:
            loop.default_exception_handler(context)


class Parts(h11.Connection):
    """State of a connection that counts what goes out, and the parts of the body that comes in.

    Attributes:
        sent: bytes that were given to the connection.
        refusal: why nothing more of the client is read.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, LARGEST_HEAD)
        self.sent = self._parts = self._bytes = 0
        self.refusal = ApiError("the request is no HTTP/1.1", "body", "invalid_http")

    def send_with_data_passthrough(self, event: Any) -> Any:
        """Return the pieces of an event, whose bytes are counted."""
        pieces = super().send_with_data_passthrough(event)
        self.sent += sum(map(len, pieces or ()))
        return pieces

    def next_event(self) -> Any:
        """Return the next event. Raises ``RemoteProtocolError`` for a body in too many parts."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._parts, self._bytes = self._parts + 1, self._bytes + len(event.data)
            if self._parts > MOST_PARTS and self._bytes < LEAST_PART * self._parts:
                message = (
                    f"the body comes in {self._parts} parts of {self._bytes} bytes; expected parts"
                    f" of at least {LEAST_PART}"
                )
                self.refusal = ApiError(message, "body", "too_many_parts", 413)
                raise h11.RemoteProtocolError(message, 413)
        return event


class Http(H11Protocol):
    """HTTP/1.1 whose connections are bounded."""

    server_state: Connections

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.conn = Parts()
        self._waiting: asyncio.TimerHandle | None = None
        self._taken, self._taken_at = 0, 0.0

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; refuse a connection too many."""
        super().connection_made(transport)
        state = self.server_state
        if len(state.connections) > state.most:
            state.refused += 1
            message = f"{state.most} connections are open; expected another try"
            after = {"Retry-After": "1"}
            error = ApiError(message, None, "too_many_connections", 503, "server_error", after)
            self.answer(error)
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the first bytes of a head do not stop the clock."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            if self._waiting is None:
                self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or a body in too many parts, and close the connection."""
        self.answer(self.conn.refusal)

    def answer(self, error: ApiError) -> None:
        """Send an error from outside of the application, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # the application sends nothing any more
            self.cycle.message_event.set()
        content = json.dumps(error.body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close", **error.headers}
        headers["Content-Length"] = str(len(content))
        with suppress(h11.LocalProtocolError):  # an answer was sent before
            for event in (
                h11.Response(status_code=error.status, headers=list(headers.items())),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def require_reader(self, now: float, patience: float) -> None:
        """Cut the connection if its client took too little of its answer for too long."""
        left = self.transport.get_write_buffer_size()
        taken = self.conn.sent - left
        if not left or taken - self._taken >= LEAST_TAKEN or not self._taken_at:
            self._taken, self._taken_at = taken, now if left else 0.0
        elif now - self._taken_at > patience:
            name = ":".join(map(str, self.client or ("a client",)))
            LOG.warning("%s read nothing for %g s: the connection is cut", name, patience)
            self.transport.abort()

    def end(self) -> None:
        """Tell a client that the server ends, or cut the connection if it has begun to answer."""
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            self.answer(server_ends())

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Server(uvicorn.Server):
    """Server whose connections are bounded, and whose requests are told when it ends.

    Args:
        app: the application.
        most: connections that may be open; fewer where handles of files are short.
        on_end: called when the server begins to end.
    """

    def __init__(self, app: Any, most: int, on_end: Callable[[], None] = lambda: None):
        config = uvicorn.Config(
            app,
            http=Http,
            ws="none",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=int(LAST_SECONDS + 2 * TOLD_SECONDS),
        )
        super().__init__(config)
        self.on_end = on_end
        self.server_state: Connections = Connections(min(most, connection_limit()))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections: a few at a time, while many may wait."""
        asyncio.get_running_loop().set_exception_handler(self.server_state.on_loop_error)
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Look after the connections once a second."""
        if counter % 10 == 0:
            self.server_state.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end for a while, and tell the others."""
        self.on_end()
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(LAST_SECONDS)
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.sleep(TOLD_SECONDS)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Http), "the server has no other connections"
            connection.end()


def connection_limit() -> int:
    """Return the connections that the handles of this process allow, of which it may open as many
    as its user lets it."""
    if sys.platform == "win32":
        return WINDOWS_SOCKETS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(ACCEPTED, soft - RESERVED)
