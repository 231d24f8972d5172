"""Demonstration: the packaged job ``demo``, its check, and a summary of what it shows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gen.bench.beside import REPEATS, relative, seconds_beside
from gen.bench.table import REFERENCE
from gen.bench.variants import Variant
from gen.cli.check import check_folder
from gen.config.job import Job, load_config
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.run import run_job
from gen.jobs.signals import STOPPED, stoppable
from gen.jobs.windows import read_window
from gen.jobs.worker import Pipes
from gen.store.ledger import WINDOWS, Row, read_rows, read_verdicts

ABOUT_TIMES = (
    f"of one image relative to {REFERENCE}, medians of {REPEATS} interleaved repeats (min-max)"
)
NO_TIMES: Mapping[str, str] = {}
COMPARED = (REFERENCE, "speculative_jacobi", "maskgit")  # the first is the reference


def demo(args: argparse.Namespace) -> int:
    """Carry out ``gen demo``; return the exit code."""
    overrides = list(args.overrides)
    if args.out is not None:
        given = next((x for x in overrides if x.partition("=")[0].strip() == "out"), None)
        if given is not None:
            raise GenError(f"out comes as --out {args.out!r} and as {given!r}; expected one")
        overrides.append(f"out={json.dumps(args.out, ensure_ascii=False)}")
    job = load_config("demo", overrides)
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
    times, noise = timed(job)
    print("\n".join(summary(Path(job.out), times)))
    print(f"times: {noise or ABOUT_TIMES}; for more, gen bench image")
    print(f"gallery: {Path(made['gallery']).resolve()}")
    print("live page: gen serve, which needs the extra serve: pip install -e '.[serve]'")
    return 1 if made["failed"] or report["broken"] else 0


def timed(job: Job) -> tuple[dict[str, str], str | None]:
    """Measure the compared samplers beside each other on the first prompt, with the windows of the
    folder: one run of a job does not measure times.

    Returns:
        Times relative to the reference, by sampler; none where they are noise, and the reason.
    """
    rows: dict[str, Variant] = {}
    for number, entry in enumerate(job.entries):
        path = Path(job.out) / WINDOWS / f"{number}.json"
        window = {"window": read_window(path)} if path.is_file() else {}
        name = entry.sampler["name"]
        rows.setdefault(name, Variant(name, {**entry.sampler, **window}, entry.sampling, name))
    first = job.entries[0]
    pipe = Pipes().of(first)
    items = pipe.plan(first.prompts[:1], 1, first.seed)
    return relative(seconds_beside(pipe, [rows[name] for name in COMPARED], items))


def summary(folder: Path, times: Mapping[str, str] = NO_TIMES) -> list[str]:
    """Summarise a checked folder of the job ``demo`` in five lines, with the times of the compared
    samplers where there are some."""
    rows, verdicts = read_rows(folder), read_verdicts(folder)
    first = {name: _rows_of(rows, name) for name in COMPARED}
    reference = first[COMPARED[0]]
    lines = [f"{len(reference)} images from the same prompts and seeds:"]
    width = max(map(len, times.values()), default=0)
    column = {name: f"{times[name]:{width}}   " if times else "" for name in COMPARED}
    for name, group in first.items():
        line = (
            f"  {name:20}{median(r['nfe'] for r in group):4g} forward passes"
            f"   {column[name]}{_passed(group, verdicts)}"
        )
        if name != COMPARED[0] and group[0]["model"] == reference[0]["model"]:
            pairs = zip(reference, group, strict=True)
            same = sum(np.array_equal(_pixels(folder, a), _pixels(folder, b)) for a, b in pairs)
            line += f", {same} of {len(group)} the same images"
        lines.append(line)
    modalities = {r["modality"] for r in rows}
    lines.append(f"{len(rows)} outputs of {len(modalities)} modalities: {_passed(rows, verdicts)}")
    return lines


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
