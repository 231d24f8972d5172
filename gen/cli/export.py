"""Command ``export``."""

from __future__ import annotations

import argparse
import sys

from gen.core.errors import GenError
from gen.core.tables import plural
from gen.jobs.export import export_parquet
from gen.jobs.export_folder import export_dataset


def export(args: argparse.Namespace) -> int:
    """Carry out ``gen export``; return 1 if requested media are missing or altered."""
    if (args.parquet is None) == (args.dataset is None):
        raise GenError("gen export takes one of --parquet FILE and --dataset FOLDER")
    if args.dataset is not None:
        made = export_dataset(args.folder, args.dataset)
        print(
            f"{made['folder']}: {plural(made['rows'], made['kind'] + ' file')} and metadata.jsonl"
        )
        return _tell_lost(made["lost"], "not in the folder")
    found = export_parquet(args.folder, args.parquet, media=args.media)
    failed = f", {found['failed']} of them failed" if found["failed"] else ""
    pending = f"; {plural(found['pending'], 'item')} still pending" if found["pending"] else ""
    print(
        f"{found['file']}: {plural(found['rows'], 'row')}{failed}, {found['bytes']} bytes{pending}"
    )
    return _tell_lost(found["lost"], "without bytes in the file")


def _tell_lost(lost: list[str], result: str) -> int:
    """Name media that could not be exported; return the exit code."""
    if not lost:
        return 0
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    print(
        f"gen: the media of {', '.join(lost[:3])}{more} are missing or altered and {result}; gen"
        " run makes them again",
        file=sys.stderr,
    )
    return 1
