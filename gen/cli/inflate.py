"""Command ``inflate``."""

from __future__ import annotations

import argparse
import json

from gen.core.checks import check_int
from gen.models.load.inflate import inflate, parse_size


def inflate_model(args: argparse.Namespace) -> int:
    """Carry out ``gen inflate``; return the exit code."""
    check_int("--seed", args.seed, 0)
    made = inflate(args.model, parse_size(args.params, "--params"), args.out, args.seed)
    if args.json:
        print(json.dumps(made))
    else:
        print(
            f"{made['folder']}: {made['parameters']:,} parameters, {made['layers']} layers of width"
            f" {made['width']}, the function of {made['model']}"
        )
    return 0
