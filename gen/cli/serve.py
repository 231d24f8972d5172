"""Implementation of ``gen serve``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gen.core.errors import GenError
from gen.serve.settings import Settings, read_keys, require_key

LAST_PORT = 65_535


def serve(args: argparse.Namespace) -> int:
    """Serve until the command is interrupted."""
    if not 0 <= args.port <= LAST_PORT:
        raise GenError(f"--port {args.port}; expected 0 to {LAST_PORT}")
    keys = read_keys(args.api_key_file)
    require_key(args.host, keys)
    limits = {k: getattr(args, k) for k in ("max_body", "rate", "deadline")}
    settings = Settings(
        keys,
        batches=None if args.batches is None else Path(args.batches).expanduser().absolute(),
        **{k: v for k, v in limits.items() if v is not None},
    )
    try:
        import fastapi  # noqa: F401  the extra, whose absence is told before anything is loaded
        import multipart  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise GenError(
            f"gen serve needs {error.name}; install it with: pip install 'gen-toolkit[serve]'"
        ) from None
    from gen.serve.run import serve_until_stopped  # after the extra is known to be there

    return serve_until_stopped(args, settings)
