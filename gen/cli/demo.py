"""Demonstration: the packaged job ``demo``, its check, and a summary of what it shows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gen.cli.check import check_folder
from gen.config.entries import Entry
from gen.config.job import load_config
from gen.core.registry import registry
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.run import run_job
from gen.jobs.signals import STOPPED, stoppable
from gen.pipeline.pipeline import load
from gen.store.ledger import CHECK, Row, read_json, read_rows

COMPARED = ("autoregressive", "speculative_jacobi", "maskgit")  # the first is the reference


def demo(args: argparse.Namespace) -> int:
    """Carry out ``gen demo``; return the exit code."""
    job = load_config("demo", args.overrides)
    progress = for_terminal()
    with stoppable(progress.note) as stop:
        made = run_job(job, progress=progress, stop=stop)
    if made["pending"]:
        print(
            f"gen: stopped with {made['pending']} items left; run the same command to resume",
            file=sys.stderr,
        )
        return STOPPED
    report = check_folder(job.out)
    batch = {name: batch_seconds(_entry_of(job.entries, name)) for name in COMPARED}
    print("\n".join(summary(Path(job.out), batch)))
    print(f"gallery: {Path(made['gallery']).resolve()}")
    print("live page: gen serve, which needs the extra serve: pip install -e '.[serve]'")
    return 1 if made["failed"] or report["broken"] else 0


def batch_seconds(entry: Entry) -> float:
    """Decode all prompts of an entry as one batch, and return the seconds per item."""
    pipe = load(entry.modality, model=entry.model, device=entry.device, dtype=entry.dtype)
    items = pipe.plan(entry.prompts, 1, entry.seed)
    pipe.generate(items[:1], entry.sampler, entry.sampling)  # loads the model
    began = time.perf_counter()
    pipe.generate(items, entry.sampler, entry.sampling)
    return (time.perf_counter() - began) / len(items)


def summary(folder: Path, batch: Mapping[str, float]) -> list[str]:
    """Summarise a checked folder of the job ``demo`` in five lines.

    Args:
        folder: folder of the job.
        batch: seconds per item of all prompts in one batch, by sampler.
    """
    rows, verdicts = read_rows(folder), read_json(folder / CHECK)
    first = {name: _rows_of(rows, name) for name in COMPARED}
    reference = first[COMPARED[0]]
    lines = [
        f"{len(reference)} images from the same prompts and seeds, one at a time and as one batch:"
    ]
    for name, group in first.items():
        line = (
            f"  {name:20}{median(r['nfe'] for r in group):4g} forward passes"
            f"{median(r['seconds'] for r in group):7.2f} s"
            f"{batch[name]:7.2f} s each in a batch   {_passed(group, verdicts)}"
        )
        if name != COMPARED[0] and group[0]["model"] == reference[0]["model"]:
            pairs = zip(reference, group, strict=True)
            same = sum(np.array_equal(_pixels(folder, a), _pixels(folder, b)) for a, b in pairs)
            line += f", {same} of {len(group)} the same images"
        lines.append(line)
    modalities = {r["modality"] for r in rows}
    lines.append(f"{len(rows)} outputs of {len(modalities)} modalities: {_passed(rows, verdicts)}")
    return lines


def _entry_of(entries: Sequence[Entry], sampler: str) -> Entry:
    """Return the first entry with a sampler."""
    return next(e for e in entries if e.sampler["name"] == sampler)


def _rows_of(rows: list[Row], sampler: str) -> list[Row]:
    """Rows of the first job with a sampler."""
    texts = [r for r in rows if "condition" not in r]  # prompts that are texts alone
    group = [r for r in texts if r["sampler"].split()[0] == sampler]  # the label's first word
    return [r for r in group if all(r[k] == group[0][k] for k in ("modality", "model"))]


def _passed(rows: list[Row], verdicts: dict[str, Any]) -> str:
    return f"{sum(verdicts[r['id']]['passed'] for r in rows)} of {len(rows)} as prompted"


def _pixels(folder: Path, row: Row) -> np.ndarray:
    """Pixels of an image; its file also holds its sampler and parameters."""
    return np.asarray(registry.get("modality", row["modality"])().load(folder / row["file"]))
