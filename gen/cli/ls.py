"""Command ``ls``."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

from gen.cli.commands.ls import LISTINGS
from gen.core.tables import EMPTY, columns

# for --json and the pages; a line must fit a terminal
LONG = (
    "params",
    "draws",
    "reference",
    "papers",
    "paper",
    "title",
    "presets",
    "options",
    "tested",
    "limit",
)


def ls(args: argparse.Namespace) -> int:
    """Print what there is of a kind, or the kinds."""
    if args.kind is None:
        print(json.dumps(list(LISTINGS), indent=2) if args.json else "\n".join(LISTINGS))
        return 0
    module, _, function = LISTINGS[args.kind].partition(":")
    table = getattr(import_module(module), function)()
    if args.json:
        print(json.dumps(table, ensure_ascii=False, indent=2))
        return 0
    if not table:
        print(f"no {args.kind}")
        return 0
    keys = [k for k in table[0] if k not in LONG]
    rows = [[k.replace("_", " ") for k in keys], *([_cell(row[k]) for k in keys] for row in table)]
    print(columns(rows))
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or EMPTY
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or EMPTY
