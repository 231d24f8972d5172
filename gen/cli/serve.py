"""Implementation of ``gen serve``: what can be told without torch, then the server."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from gen.cli.arguments import deferred
from gen.constraints.budget import FLAGS, Limits
from gen.core.errors import GenError, bad_value
from gen.serve.settings import Settings, read_keys, require_key

LAST_PORT = 65_535
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
OF_REPLICAS = ("ray", "grpc", "aiohttp")


def serve(args: argparse.Namespace) -> int:
    """Serve until the command is interrupted."""
    if not 0 <= args.port <= LAST_PORT:
        raise bad_value("--port", args.port, f"0 to {LAST_PORT}")
    for name in ("max_rows", "max_waiting", "replicas"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise bad_value(f"--{name.replace('_', '-')}", value, "an integer of at least 1")
    args.limits = _limits(args)
    keys = read_keys(args.api_key_file)
    require_key(args.host, keys)
    limits = {k: getattr(args, k) for k in ("max_body", "max_connections", "rate", "deadline")}
    args.settings = Settings(
        keys,
        cors=tuple(args.cors),
        batches=None if args.batches is None else Path(args.batches).expanduser().absolute(),
        **{k: v for k, v in limits.items() if v is not None},
    )
    require_extra("serve", NEEDED)
    if args.replicas is None:
        return deferred("gen.serve.run:serve_until_stopped")(args)
    if args.model or args.model_option or args.batches:
        raise GenError(
            "--replicas came with --model, --model-option or --batches; expected it without them"
        )
    require_extra("serve,ray", OF_REPLICAS)
    return deferred("gen.serve.replicas:serve_until_stopped")(args)


def _limits(args: argparse.Namespace) -> Limits:
    """Return what building a constraint may take. Raises ``GenError`` for a value of 0 or less."""
    given = {}
    for name, flag in FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None and not value > 0:
            raise bad_value(flag, value, "a number above 0")
        if value is not None:
            given[name] = value
    return Limits(**given)


def require_extra(extra: str, needed: tuple[str, ...]) -> None:
    """Raise ``GenError`` where a package of an extra is not installed."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise GenError(
            f"gen serve needs {', '.join(missing)}; expected the extra, which pip install"
            f" 'gen-toolkit[{extra}]' installs"
        )
