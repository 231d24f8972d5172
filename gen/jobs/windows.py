"""Windows of a job that says ``window: auto``.

A call finds its window while it decodes, with the clock where that is clear, so the forward passes
of a job would depend on when it was interrupted, and with most couplings the tokens too. In a job
the window is measured once: the first worker that comes to such items decodes a batch of them with
each width, and puts the best into the folder by the rule of ``gen.samplers.engine.window``: by
counted tokens, unless the clock is clear and says otherwise, twice. It is 1 where the first batch
accepted less than one draft in four forward passes. All workers, and every later run in that
folder, take it from there.

    windows/<entry>.json    {"window": 16, "by": "count", "seconds": {"1": ...}, "items": 8}

``seconds`` are those of the batch with each width as the rule sees them: measured if ``by`` is
``clock``, else those of width 1 in proportion to the nominal cost.

The plan does not depend on it, and needs no model: it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gen.config.entries import Entry
from gen.core.errors import GenError, describe
from gen.core.files import writing
from gen.core.resolve import resolve_sampler
from gen.jobs.progress.report import Silent
from gen.samplers.engine.window import AUTO, LADDER, LEAST, WORTH, Widths
from gen.store.claims import create, locked
from gen.store.ledger import WINDOWS, read_sealed
from gen.store.sealed import seal

FIRST = 8  # width of the first batch


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
                    create(path, seal(found))
    return replace(entry, sampler={**entry.sampler, "window": read_window(path)})


def read_window(path: Path) -> int:
    """Read the window of an entry. Raises ``GenError`` for a damaged file."""
    window = read_sealed(path, "remove it and resume").get("window")
    if not isinstance(window, int) or window < 1:
        raise GenError(f"{path} is damaged: it has no window; remove it and resume")
    return window


def measure_windows(
    pipe: Any, entry: Entry, plans: Sequence[Any], progress: Silent
) -> dict[str, Any] | None:
    """Decode a batch with one width after the other until wider ones are worth far less; with a
    single one where hardly a draft is accepted.

    Returns:
        The best width, what decided, and the seconds of each; None where the batch cannot be
        decoded, which is then refused, item by item, where it is decoded for the job.
    """
    trial = Trial(pipe, entry, plans)
    try:
        if trial.decode(FIRST) < 1 + LEAST:
            return {"window": 1, "by": "count", "seconds": {}, "items": len(plans)}
        for width in LADDER:
            if width != FIRST:
                trial.decode(width)
            if trial.ends_at(width):
                break
        return trial.result()
    except Exception as error:  # a prompt, or the memory
        progress.note(f"window auto was not measured: {describe(error)}")
        return None


class Trial:
    """Decodes a batch with several widths, counts, and times single steps.

    Args:
        pipe: pipeline of the entry.
        entry: entry whose window is wanted.
        plans: the items of the batch.
    """

    def __init__(self, pipe: Any, entry: Entry, plans: Sequence[Any]):
        self.pipe, self.entry, self.plans, self.rows = pipe, entry, plans, len(plans)
        branches = 2 if resolve_sampler(entry.sampler, entry.sampling)[1].guided else 1
        self.known = Widths.on(pipe.device, branches)
        self.widths: list[int] = []
        self.far = 0.0  # tokens of a row in the middle of the batch
        self.tokens = self.seconds = 0.0  # of a row and of the batch, with width 1

    def decode(self, width: int) -> float:
        """Decode the batch, and return the tokens per forward pass."""
        ends: list[tuple[float, float]] = []

        def note(info: dict[str, Any]) -> None:
            self.far = info["total"] / 2 / self.rows
            if 2 * info["done"] <= info["total"]:  # all rows are there, with all positions
                ends.append((info["done"] / self.rows, self.known.clock()))

        spec = {**self.entry.sampler, "window": width}
        stats = self.pipe.generate(self.plans, spec, dict(self.entry.sampling), callback=note).stats
        for (_, before), (far, after) in pairwise(ends):
            self.known.see(self.rows, width, far, after - before, None)
        passes, tokens = sum(s.nfe for s in stats), sum(s.tokens for s in stats)
        self.known.tokens[width] = [passes, tokens]
        if width == 1:
            self.tokens, self.seconds = tokens / self.rows, sum(s.seconds for s in stats)
        self.widths = sorted({*self.widths, width})
        return tokens / passes

    def ends_at(self, width: int) -> bool:
        """Return True if a width is worth so much less than a narrower one that wider ones are."""
        best = self.known.choose(self.rows, self.widths, self.far)
        return width > best and self.known.ratio(self.rows, width, best, self.far) < WORTH

    def result(self) -> dict[str, Any]:
        """Return the best width, what decided, and the seconds of the batch with each."""
        known, rows = self.known, self.rows
        counted = known.counted(rows, self.widths)
        best = known.choose(rows, self.widths, self.far)
        if best != counted:  # in the other order: a machine that slowed down misleads one of them
            for width in (best, counted):
                self.decode(width)
            best = known.choose(rows, sorted((best, counted)), self.far)
        if best == counted:
            worth = {w: known.gain(w) / known.nominal(rows, w) for w in self.widths}
            seconds = {w: self.seconds * worth[1] / worth[w] for w in self.widths}
            return {"window": best, "by": "count", "seconds": seconds, "items": rows}
        clear = [w for w in self.widths if known.is_clear(w)]
        seconds = {w: self.tokens / known.worth(rows, w, self.far) for w in clear}
        best = min(clear, key=seconds.__getitem__)
        return {"window": best, "by": "clock", "seconds": seconds, "items": rows}
