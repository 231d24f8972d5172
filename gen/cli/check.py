"""Check of a job folder: the modality judges every output, from the file alone."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, describe
from gen.core.files import put_text, sha256, writing
from gen.core.printable import printable
from gen.core.registry import registry
from gen.core.tables import columns
from gen.gallery import write as gallery_page
from gen.store.ledger import CHECK, read_rows, require_job
from gen.store.shard_reader import Members


def check_folder(folder: str | Path) -> dict[str, Any]:
    """Check every output of a folder with the modality's checker; write
    ``check.json`` and the gallery.

    Returns ``items``, the shares ``passed`` and ``valid``, both ``by_sampler`` as well, and
    ``failed``: the items that are not both. An output that is missing, altered or unreadable is not
    valid, and one of ``broken``.
    """
    folder = require_job(folder)
    rows = read_rows(folder)
    if not rows:
        raise GenError(f"{folder} has no items yet; expected a manifest with at least one")
    verdicts: dict[str, dict[str, Any]] = {}
    modalities: dict[str, Any] = {}
    broken = 0
    with Members(folder) as members:
        for row in rows:
            name = row["modality"]
            if name not in modalities:
                modalities[name] = registry.get("modality", name, str(folder))()
            verdicts[row["id"]], judged = _check_row(members, row, modalities[name])
            broken += not judged
    put_text(folder / CHECK, json.dumps(verdicts, ensure_ascii=False) + "\n")
    with writing(folder):
        gallery_page.write_gallery(folder)
    by_sampler: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_sampler[row["sampler"]].append(verdicts[row["id"]])
    failed = [
        {"id": r["id"], "prompt": r["prompt"], "file": r["file"], **verdicts[r["id"]]}
        for r in rows
        if not (verdicts[r["id"]]["passed"] and verdicts[r["id"]]["valid"])
    ]
    shares = {name: _shares(v) for name, v in by_sampler.items()}
    return {
        **_shares(list(verdicts.values())),
        "broken": broken,
        "by_sampler": shares,
        "failed": failed,
    }


def _check_row(members: Members, row: dict[str, Any], modality: Any) -> tuple[dict[str, Any], bool]:
    """Return the verdict, and True if there was an output to judge."""

    def wrong(detail):
        return ({"passed": False, "valid": False, "detail": detail}, False)

    if row["status"] != "ok":
        return wrong(f"the item failed: {row['error']}")
    with members.path(row) as path:
        if path is None:
            return wrong(f"file {row.get('member') or row['file']!r} is missing")
        if sha256(path) != row["sha256"]:
            return wrong(
                f"file {path.name} is not the one the manifest describes (its sha256 differs)"
            )
        try:
            verdict = modality.check(modality.load(path), row["prompt"])
        except Exception as problem:  # a decoder may raise anything on a broken file
            return wrong(f"file {path.name} cannot be checked: {describe(problem)}")
    return {
        "passed": bool(verdict.passed),
        "valid": bool(verdict.valid),
        "detail": verdict.detail,
    }, True


def _shares(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    def share(key):
        return sum(v[key] for v in verdicts) / len(verdicts)

    return {"items": len(verdicts), "passed": share("passed"), "valid": share("valid")}


# --- the commands


def gallery(args: argparse.Namespace) -> int:
    """Carry out ``gen gallery``; return the exit code."""
    folder = require_job(args.folder)
    with writing(folder):
        print(gallery_page.write_gallery(folder))
    return 0


def check(args: argparse.Namespace) -> int:
    """Carry out ``gen check``; return the exit code."""
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
    print(printable(columns(rows)))
    for item in report["failed"][:10]:
        print(printable(f"{item['id']} {item['prompt']!r}: {item['detail']}"))
    if len(report["failed"]) > 10:
        print(f"... and {len(report['failed']) - 10} more (--json lists all)")
