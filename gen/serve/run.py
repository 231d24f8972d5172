"""uvicorn with the application: addresses, time limits of connections, the end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gen.config.model_options import read_options
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import registry
from gen.engine.engine import MOST_ROWS, MOST_WAITING, Engine
from gen.pipeline.led import led
from gen.pipeline.pipeline import Pipeline, load
from gen.serve.app import make_app

HEAD_SECONDS = 10.0  # in which the head of a request must arrive, from its connection on
IDLE_SECONDS = 15  # that a connection is kept between requests
LAST_SECONDS = 10  # that running requests have when the server ends
LARGEST_HEAD = 32_768  # bytes


class Http(H11Protocol):
    """HTTP/1.1 that closes connections whose requests do not begin in time."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
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

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def make_engine(args: argparse.Namespace, load: Callable[..., Pipeline] = load) -> Engine:
    """Return the engine of a command line, whose models ``load`` loads. Raises ``GenError`` for a
    model that cannot be read."""
    device = args.device or "auto"
    named: dict[str, tuple[str, str]] = {}
    for text in args.model:
        name, equals, rest = text.partition("=")
        modality, colon, path = rest.partition(":")
        if not (name and equals and modality and colon and path):
            raise GenError(f"--model {text!r}; expected ID=MODALITY:PATH")
        if name in named:
            raise GenError(f"--model {name} is given twice")
        registry.get("modality", modality, "--model")
        named[name] = (modality, path)
    options = _options_by_id(args.model_option, named)
    models = {
        name: load(modality, model=path, device=device, dtype=args.dtype, **options[name])
        for name, (modality, path) in named.items()
    }
    return Engine(
        models or None,
        device,
        args.dtype or "float32",
        max_rows=MOST_ROWS if args.max_rows is None else args.max_rows,
        max_waiting=MOST_WAITING if args.max_waiting is None else args.max_waiting,
        limits=args.limits,
    )


def _options_by_id(texts: Sequence[str], ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Read ``ID:KEY=VALUE`` texts; return options by the id of the model.

    Raises:
        GenError: a text of another form, or an unknown id.
    """
    found: dict[str, list[str]] = {name: [] for name in ids}
    for text in texts:
        name, colon, rest = text.partition(":")
        if not colon or "=" in name:
            raise bad_value("--model-option", text, "ID:KEY=VALUE, such as mine:revision=v1")
        if name not in found:
            raise unknown("model", name, found, "--model-option")
        found[name].append(rest)
    return {name: read_options(of_id, "--model-option") for name, of_id in found.items()}


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: address.
        port: port; 0 takes a free one.

    Raises:
        GenError: the address or the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=2048)
        # connections inherit it: small parts of a stream must not wait for each other
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except (OSError, OverflowError) as error:
        raise GenError(
            f"{host}:{port} cannot be used ({error}); expected an address of this machine and a"
            " free port"
        ) from None


class Server(uvicorn.Server):
    """Server that tells its engine when it begins to end."""

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None]):
        super().__init__(config)
        self.on_end = on_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and let running requests end."""
        self.on_end()
        await super().shutdown(sockets)


def make_server(app: Any, on_end: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Return a server of an application, for a socket that listens. ``on_end`` is called when it
    begins to end."""
    config = uvicorn.Config(
        app,
        http=Http,
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
    )
    return Server(config, on_end)


def serve_until_stopped(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; running requests have some seconds to end.

    Of the processes of a launcher, which have models with ``tp`` together, the first one serves.
    """
    if not any(text.partition(":")[2].startswith("tp=") for text in args.model_option):
        return _serve(args, make_engine(args))
    with led() as leader:
        return 0 if leader is None else _serve(args, make_engine(args, leader.load))


def _serve(args: argparse.Namespace, engine: Engine) -> int:
    """Carry out ``serve_until_stopped`` with an engine, which is closed."""
    try:
        engine.constraints.start()
        server = make_server(make_app(engine, args.settings), engine.stop_building)
        bound = listening(args.host, args.port)
        port = bound.getsockname()[1]
        shown = f"[{args.host}]" if ":" in args.host else args.host
        print(f"http://{shown}:{port} (Ctrl-C ends it)", flush=True)
        try:
            server.run([bound])
        except KeyboardInterrupt:
            pass  # the usual end of this command
    finally:
        engine.close()
        gc.freeze()  # the interpreter would look through all that stands before it ends
    return 0


@contextmanager
def running(app: Any, host: str = "127.0.0.1", port: int = 0):
    """Serve an application in a thread; yield its port, and end it behind.

    Args:
        app: the application.
        host: address to listen on.
        port: port; 0 takes a free one.
    """
    bound = listening(host, port)
    server = make_server(app)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
