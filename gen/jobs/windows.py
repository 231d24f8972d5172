"""Windows of a job that says ``window: auto``.

A call finds its window while it decodes, by the clock, so the forward passes of a job would depend
on when it was interrupted, and with most couplings the tokens too. In a job the window is measured
once: the first worker that comes to such items decodes a batch of them with each width, and puts
the fastest into the folder, or 1 where the first batch accepted less than one draft in four forward
passes. All workers, and every later run in that folder, take it from there.

    windows/<entry>.json    {"window": 16, "seconds": {"1": ..., "4": ...}, "items": 8}

The plan does not depend on it, and needs no model: it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gen.config.entries import Entry
from gen.core.errors import describe
from gen.core.files import writing
from gen.core.sampler import resolve_sampler
from gen.jobs.progress.report import Silent
from gen.samplers.engine.window import AUTO, LADDER, LEAST, WORTH
from gen.store.claims import create, locked
from gen.store.ledger import WINDOWS

WARM = 8  # width of the first batch, which is not counted


def is_auto(entry: Entry) -> bool:
    """Return True if the sampler of an entry has a window that a clock chooses."""
    sampler = resolve_sampler(entry.sampler, entry.sampling)[0]
    has = {f.name for f in fields(sampler)}
    return "window" in has and vars(sampler)["window"] == AUTO


def with_window(
    folder: Path,
    entry: Entry,
    number: int,
    overrides: dict[str, Any],
    pipe: Any,
    plans: Sequence[Any],
    progress: Silent,
) -> Entry:
    """Return an entry with the folder's window in place of ``auto``, measured where there is none.

    Args:
        folder: folder of the job.
        entry: entry with the overrides of its rows.
        number: number of the entry.
        overrides: what its rows override; rows with other overrides have a window of their own.
        pipe: pipeline of the entry.
        plans: planned items to measure with, at least one.
        progress: is told what could not be measured.
    """
    text = json.dumps(overrides, sort_keys=True, ensure_ascii=False)
    mark = f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if overrides else ""
    path = folder / WINDOWS / f"{number}{mark}.json"
    if not path.is_file():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        with locked(path.parent / "lock", create=True):  # two would slow each other down
            if not path.is_file():
                found = measure_windows(pipe, entry, plans[: entry.batch_size], progress)
                if found is None:
                    return entry
                with writing(path):
                    create(path, json.dumps(found).encode() + b"\n")
    window = json.loads(path.read_text())["window"]
    return replace(entry, sampler={**entry.sampler, "window": window})


def measure_windows(
    pipe: Any, entry: Entry, plans: Sequence[Any], progress: Silent
) -> dict[str, Any] | None:
    """Decode a batch with one width after the other until wider ones are far slower; with a single
    one where hardly a draft is accepted.

    Returns:
        The fastest width and the seconds of each; None where the batch cannot be decoded, which is
        then refused, item by item, where it is decoded for the job.
    """
    sampling, seconds = dict(entry.sampling), {}
    try:
        first = pipe.generate(plans, {**entry.sampler, "window": WARM}, sampling).stats
        if sum(s.tokens for s in first) < (1 + LEAST) * sum(s.nfe for s in first):
            return {"window": 1, "seconds": {}, "items": len(plans)}
        for width in LADDER:
            out = pipe.generate(plans, {**entry.sampler, "window": width}, sampling)
            seconds[width] = sum(s.seconds for s in out.stats)
            if seconds[width] * WORTH > min(seconds.values()):
                break
    except Exception as error:  # a prompt, or the memory
        progress.note(f"window auto was not measured: {describe(error)}")
        return None
    best = min(seconds, key=seconds.__getitem__)
    return {"window": best, "seconds": seconds, "items": len(plans)}
