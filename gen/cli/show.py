"""Command ``show``."""

from __future__ import annotations

import argparse

from gen.config.entries import fingerprint
from gen.config.job import load_config


def show(args: argparse.Namespace) -> int:
    """Print a resolved config and its fingerprint."""
    job = load_config(args.config, args.overrides)
    print(job.to_yaml() + f"# fingerprint: {fingerprint(job)}")
    return 0
