"""The application in several processes behind one address, by Ray Serve (extra ``ray``).

Every replica has an engine of its own and loads the models that it is asked for. What belongs to
one process is not offered: ``/v1/videos`` and ``/v1/batches`` would answer from whichever replica
a request meets, and no answer of ``/v1/responses`` is kept. Time limits of connections are those of
Ray's proxy.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from gen.engine.engine import MOST_ROWS, MOST_WAITING, Engine
from gen.serve.app import make_app
from gen.serve.settings import Settings


def replicated(
    replicas: int,
    settings: Settings,
    engine: dict[str, Any] | None = None,
    resources: dict[str, Any] | None = None,
) -> Any:
    """Return the application for ``ray.serve.run``.

    Args:
        replicas: number of processes.
        settings: settings of each; those of files, videos and kept answers are not used.
        engine: arguments of ``Engine``, without ``models``.
        resources: resources of each replica, such as ``{"num_gpus": 1}``.
    """
    own = replace(settings, batches=None, kept_videos=0, kept_responses=0)

    def build() -> FastAPI:
        return make_app(Engine(**(engine or {})), own)

    @serve.deployment(
        name="gen",
        num_replicas=replicas,
        max_ongoing_requests=own.max_open,
        ray_actor_options=resources or {},
    )
    @serve.ingress(build)
    class Replica:
        """One engine and its application."""

    return Replica.bind()


def serve_until_stopped(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, in the cluster of ``RAY_ADDRESS`` or in one of its own."""
    engine = {
        "device": args.device or "auto",
        "dtype": args.dtype or "float32",
        "max_rows": MOST_ROWS if args.max_rows is None else args.max_rows,
        "max_waiting": MOST_WAITING if args.max_waiting is None else args.max_waiting,
        "limits": args.limits,
    }
    ray.init(include_dashboard=False, ignore_reinit_error=True)
    serve.start(http_options={"host": args.host, "port": args.port})
    try:
        serve.run(replicated(args.replicas, args.settings, engine))
        print(f"http://{args.host}:{args.port} (Ctrl-C ends it)", flush=True)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        return 0  # the usual end of this command
    finally:
        serve.shutdown()
        ray.shutdown()
