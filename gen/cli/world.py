"""Implementation of ``gen world``."""

from __future__ import annotations

import argparse
import webbrowser

import torch

from gen.config.model_options import read_options
from gen.core.errors import GenError
from gen.pipeline.pipeline import Pipeline
from gen.play.world import MODALITY
from gen.serve.world.server import HOST, make_server
from gen.serve.world.worlds import Worlds

LAST_PORT = 65_535


def world(args: argparse.Namespace) -> int:
    """Serve the playable page until the command is interrupted."""
    if not 0 <= args.port <= LAST_PORT:
        raise GenError(f"--port {args.port}; expected 0 to {LAST_PORT}")
    options = read_options(args.model_option or (), "--model-option")
    pipe = Pipeline(MODALITY, args.model, args.device or "cpu", args.dtype, **options)
    pipe.bound(pipe.model_name("next_frame"))
    torch.set_num_threads(1)  # frames are small: more threads wait for each other
    server = make_server(Worlds(pipe), args.port)
    address = f"http://{HOST}:{server.server_address[1]}/world"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # the usual end of this command
    finally:
        server.server_close()
    return 0
