"""Command ``train``."""

from __future__ import annotations

import argparse
import json
import logging
import sys

from gen.core.log import logger
from gen.training.config import load_training
from gen.training.run import train as run_training


def train(args: argparse.Namespace) -> int:
    """Carry out ``gen train``."""
    config = load_training(args.config, args.overrides, args.allow_env)
    is_quiet = not logger.isEnabledFor(logging.WARNING)

    def say(text: str) -> None:
        if not is_quiet:
            print(text, file=sys.stderr, flush=True)

    done = run_training(config, say)
    if args.json and done:
        print(json.dumps(done, ensure_ascii=False))
        return 0
    for key in ("model", "adapter", "page", "use"):
        if key in done:
            print(f"{key}: {done[key]}")
    return 0
