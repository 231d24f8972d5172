"""Guards before all routes: API key, other sites, rate, size and pace of a request.

They are plain ASGI: a response that streams goes through them piece by piece. A HEAD is answered
as a GET without its body. A request that is cancelled, since the server ends, is told so.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any
from urllib.parse import SplitResult

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gen.core.errors import shown
from gen.core.plain import is_digits
from gen.serve.api.errors import ApiError, event_of, server_ends, too_many
from gen.serve.metrics import Metrics
from gen.serve.settings import Settings, is_loopback, origin_of

# paths that need no key: the pages ask for one, and use it for everything else
OPEN = ("/", "/world", "/health", "/docs", "/openapi.json", "/favicon.ico")
OPEN_BELOW = ("/static/",)
CLIENTS = 10_000  # clients whose rates are remembered
MOST_HELD = 512_000_000  # bytes of bodies, over all requests that are open
MOST_DRAINED = 256_000_000  # bytes of a refused body that are read and thrown away
DRAINED_SECONDS = 2.0
PORTS = {"http": 80, "https": 443}  # of origins that name none


class Rates:
    """Requests of each client in the last minute, as buckets that fill up again.

    Args:
        per_minute: requests of a client per minute, which may come at once.
    """

    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str, now: float) -> float:
        """Count a request; return the seconds after which the client may send one, 0 for now."""
        left, since = self.buckets.pop(client, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - since) * self.per_minute / 60)
        wait = 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute
        self.buckets[client] = (left - (wait == 0), now)
        if len(self.buckets) > CLIENTS:
            self.buckets.popitem(last=False)
        return wait


class Guards:
    """Middleware that refuses requests before they are read.

    Args:
        app: what comes behind.
        settings: settings of the server.
        metrics: where responses are counted.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self.app, self.settings, self.metrics = app, settings, metrics
        self.open, self.held = 0, Held()
        self.rates = None if settings.rate is None else Rates(settings.rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return None
        pace = Pace(self.settings, self.held, scope, receive, send)
        if scope["method"] == "HEAD":  # the server knows the method of its own scope
            scope = {**scope, "method": "GET"}
        self.open += 1
        try:
            self._check(scope)
            await self.app(scope, pace.receive, pace.send)
        except ApiError as error:
            await pace.refuse(error)
        except asyncio.CancelledError:  # the server ends
            await pace.end()
        finally:
            self.open -= 1
            self.held.bytes -= pace.bytes
            route = scope.get("route")
            path = route.path_format if isinstance(route, Route) else "none"
            self.metrics.responses.labels(path, str(pace.status)).inc()

    def _check(self, scope: Scope) -> None:
        """Refuse a request by its head alone. Raises ``ApiError``."""
        headers, path = Headers(scope=scope), scope["path"]
        key = self._key(headers)
        if not self.settings.api_keys:
            require_local(headers, self.settings.cors)
        if path != "/health":
            self._require_room(key or (scope.get("client") or ("",))[0])
        is_open = path in OPEN or path.startswith(OPEN_BELOW)
        if self.settings.api_keys and key is None and not is_open:
            raise ApiError(
                "the API key is missing or wrong; expected the header Authorization: Bearer KEY",
                "Authorization",
                "invalid_api_key",
                401,
                "authentication_error",
                {"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if is_digits(length) and int(length[:20]) > self.settings.max_body:
            raise too_large(shown(length)[1:-1], self.settings.max_body)

    def _require_room(self, client: str) -> None:
        """Refuse a request of a client that sends too many, or while too many are open; wrong keys
        count as those of their address. Raises ``ApiError``."""
        if self.open > self.settings.max_open:
            raise too_many(f"{self.open} requests are open", 1, "too_many_requests")
        if self.rates is not None and (wait := self.rates.wait(client, time.monotonic())):
            limit = f"more than {self.rates.per_minute} requests in a minute"
            raise too_many(limit, wait, "rate_limit_exceeded")

    def _key(self, headers: Headers) -> str | None:
        """Return the key that a request brings, if it is right; it is compared in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        given = given.strip().encode()
        right = [key for key in self.settings.api_keys if hmac.compare_digest(key.encode(), given)]
        return right[0] if right else None


class Held:
    """Bytes of the bodies of all open requests."""

    bytes = 0


class Pace:
    """Body and response of one request, neither larger nor slower than the settings say.

    Args:
        settings: settings of the server.
        held: bytes of all bodies, to which those of this one are added.
        scope: scope of the request.
        receive: source of the body.
        send: sink of the response.
    """

    def __init__(self, settings: Settings, held: Held, scope: Scope, receive: Receive, send: Send):
        self.settings, self.held, self.scope = settings, held, scope
        self._receive, self._send = receive, send
        self.error: ApiError | None = None
        self.whole = self.refused = self.has_events = False
        self.status = 0  # of the response; 0 while there is none
        self.bytes, self.until = 0, time.monotonic() + settings.body_timeout

    async def receive(self) -> Message:
        """Return the next part of the body; later, that the client left.

        Raises:
            ApiError: the body is too large or too slow. It is the response, whatever the
                application makes of it.
        """
        if self.whole:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self.until - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            self.error = too_slow(self.settings.body_timeout)
            raise self.error from None
        size = len(message.get("body", b""))
        self.bytes, self.held.bytes = self.bytes + size, self.held.bytes + size
        self.whole = not message.get("more_body", False)
        if self.bytes > self.settings.max_body:
            self.error = too_large(f"more than {self.settings.max_body}", self.settings.max_body)
            raise self.error
        if size and self.held.bytes > max(MOST_HELD, self.settings.max_body):
            limit = f"the bodies of all open requests have {self.held.bytes} bytes"
            self.error = too_many(limit, 1, "too_many_bytes")
            raise self.error
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if self.error is not None:
            if not self.refused:
                await self.refuse(self.error)
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self.has_events = kind.startswith("text/event-stream")
        elif self.scope["method"] == "HEAD":
            message = {**message, "body": b""}
        await self._send(message)

    async def end(self) -> None:
        """Tell a client whose request is not done that the server ends: by a response, or by the
        last event of a stream. Raises ``CancelledError`` where the response is neither: its
        connection is cut, so that nobody takes a part for the whole."""
        error = server_ends()
        if not self.status:
            await error.response()(self.scope, self._receive, self._send)
            self.status = error.status
        elif self.has_events:
            last = event_of(error, is_page=self.scope["path"].startswith("/live/"))
            await self._send({"type": "http.response.body", "body": last})
        else:
            raise asyncio.CancelledError

    async def refuse(self, error: ApiError) -> None:
        """Send an error, once the client has sent its body: many read no response before."""
        self.refused, self.status = True, error.status
        left, until = MOST_DRAINED, time.monotonic() + DRAINED_SECONDS
        try:
            while not self.whole and left > 0:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await self._receive()
                left -= len(message.get("body", b""))
                self.whole = not message.get("more_body", False)
        except TimeoutError:
            pass  # it is told now, and its connection closed
        await error.response()(self.scope, self._receive, self._send)


def too_slow(seconds: float) -> ApiError:
    """Return the error of a body that did not arrive."""
    return ApiError(
        f"the body did not arrive within {seconds:g} seconds",
        "body",
        "request_timeout",
        408,
        "timeout_error",
        {"Connection": "close"},
    )


def too_large(came: Any, most: int) -> ApiError:
    """Return the error of a body of too many bytes."""
    return ApiError(
        f"the body has {came} bytes; expected at most {most}",
        "body",
        "request_too_large",
        413,
        headers={"Connection": "close"},
    )


def require_local(headers: Headers, allowed: Collection[str] = ()) -> None:
    """Refuse requests that pages of other sites send through a browser of this machine.

    The header ``Host`` must name this machine. ``Origin``, where there is one, must be the page of
    this server, at the same port, or an allowed one.

    Args:
        headers: headers of the request.
        allowed: other origins that may ask.

    Raises:
        ApiError: the request comes from elsewhere.
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    host = origin_of(f"http://{hosts[0].lower()}") if len(hosts) == 1 else None
    if host is None or not is_loopback(host.hostname or ""):
        raise _from_elsewhere("Host", hosts)
    if not origins or (len(origins) == 1 and origins[0] in allowed):
        return
    origin = origin_of(origins[0]) if len(origins) == 1 else None
    if origin is None or not is_loopback(origin.hostname or "") or _port(origin) != _port(host):
        raise _from_elsewhere("Origin", origins)


def _port(origin: SplitResult) -> int:
    return PORTS[origin.scheme] if origin.port is None else origin.port


def _from_elsewhere(name: str, values: list[str]) -> ApiError:
    return ApiError(
        f"{name} is {shown(', '.join(values))}, and the server has no API key; expected a page of"
        " this server or a program of this machine",
        name,
        "forbidden_origin",
        403,
        "permission_error",
    )
