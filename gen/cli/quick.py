"""First step of the commands that import torch: refuse names that are mistyped, then go on.

Each function imports the command itself once the names are known, because that import takes
seconds.
"""

from __future__ import annotations

import argparse

from gen.cli.names import check_name
from gen.config.packaged import find_config


def sample(args: argparse.Namespace) -> int:
    """Carry out ``gen sample``; return the exit code."""
    check_name("modality", args.modality)
    check_name("sampler", args.sampler)
    for text in args.overrides:
        key, _, value = text.partition("=")
        if key.strip() == "sampler" and value.replace("_", "").isalnum():
            check_name("sampler", value, f"override {text!r}")
    from gen.cli.make import sample  # heavy

    return sample(args)


def run(args: argparse.Namespace) -> int:
    """Carry out ``gen run``; return the exit code."""
    find_config(args.config)
    from gen.cli.make import run  # heavy

    return run(args)


def show(args: argparse.Namespace) -> int:
    """Carry out ``gen show``; return the exit code."""
    if args.config.endswith(".yaml"):
        find_config(args.config)
    from gen.cli.show import show  # heavy

    return show(args)


def bench(args: argparse.Namespace) -> int:
    """Carry out ``gen bench``; return the exit code."""
    if args.modality not in ("all", "jobs"):
        check_name("modality", args.modality)
    for name in (args.samplers or "").split(","):
        check_name("sampler", name.strip() or None, "--samplers")
    from gen.bench.run import bench  # heavy

    return bench(args)
