"""``gen check`` and ``gen gallery``: verdicts of the modality's checker, and the page of a job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from gen.core.files import writing
from gen.core.printable import printable
from gen.core.tables import columns
from gen.eval.check import check_folder
from gen.gallery import write as gallery_page
from gen.store.ledger import require_job


def gallery(args: argparse.Namespace) -> int:
    """Carry out ``gen gallery``; return the exit code."""
    folder = require_job(args.folder)
    with writing(folder):
        print(gallery_page.write_gallery(folder))
    return 0


def check(args: argparse.Namespace) -> int:
    """Carry out ``gen check``; return 1 if media are broken, and 0 else, also where no checker
    judges them."""
    report = check_folder(args.folder)
    if args.json:
        print(printable(json.dumps(report, ensure_ascii=False, indent=2)))
    else:
        _print_report(report)
    return 1 if report["broken"] else 0


def _print_report(report: dict[str, Any]) -> None:
    rows: list[Sequence[str]] = [("sampler", "items", "passed", "valid")]
    groups = [
        *report["by_sampler"].items(),
        *([("all", report)] if len(report["by_sampler"]) > 1 else []),
    ]
    rows += [
        (name, str(s["items"]), f"{s['passed']:.1%}", f"{s['valid']:.1%}") for name, s in groups
    ]
    if groups:
        print(printable(columns(rows)))
    for item in report["failed"][:10]:
        print(printable(f"{item['id']} {item['prompt']!r}: {item['detail']}"))
    if len(report["failed"]) > 10:
        print(f"... and {len(report['failed']) - 10} more (--json lists all)")
    for reason, count in report["unjudged"].items():
        said = f"{count} items not judged: {reason}; gen eval measures them (gen ls metrics)"
        print(printable(said))
