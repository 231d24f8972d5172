"""The command line that the recipes share: one stage, or all of them in order, in a work folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch


def run(
    doc: str,
    argv: list[str] | None,
    stages: Callable[[Path, Path, bool], dict[str, Callable[[], object]]],
) -> None:
    """``stages(work, zoo, quick)`` names what can be run, in order. Training here is for one thread
    per stage."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(stages(Path(), Path(), False))
    parser.add_argument("stage", choices=[*names, "all"])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and data")
    parser.add_argument(
        "--zoo", type=Path, help="folder for the finished models (default: WORK/zoo)"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of the same path")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = stages(args.work, args.zoo or args.work / "zoo", args.quick)
    for name in names if args.stage == "all" else [args.stage]:
        chosen[name]()
