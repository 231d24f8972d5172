"""The server of a command line: its models, its address, its end."""

from __future__ import annotations

import argparse
import gc
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from typing import Any

from gen.config.model_options import read_options
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import registry
from gen.engine.engine import MOST_ROWS, MOST_WAITING, Engine
from gen.pipeline.led import led
from gen.pipeline.pipeline import Pipeline, load
from gen.serve.app import make_app
from gen.serve.connections import BACKLOG, Server
from gen.serve.settings import Settings


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
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # connections inherit it: small parts of a stream must not wait for each other
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except (OSError, OverflowError) as error:
        raise GenError(
            f"{host}:{port} cannot be used ({error}); expected an address of this machine and a"
            " free port"
        ) from None


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
        most, on_end = args.settings.max_connections, engine.stop_building
        server = Server(make_app(engine, args.settings), most, on_end)
        bound = listening(args.host, args.port)
        port = bound.getsockname()[1]
        shown = f"[{args.host}]" if ":" in args.host else args.host
        gc.collect()
        gc.freeze()  # looking through what stands would hold requests up
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
def running(app: Any, host: str = "127.0.0.1", port: int = 0, most: int | None = None):
    """Serve an application in a thread; yield its port, and end it behind.

    Args:
        app: the application.
        host: address to listen on.
        port: port; 0 takes a free one.
        most: connections that may be open; None takes those of ``Settings``.
    """
    bound = listening(host, port)
    server = Server(app, Settings.max_connections if most is None else most)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
