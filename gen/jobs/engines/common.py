"""Common parts of the engines: counting finished items, options, and the message for work that
no worker is left to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen.config.entries import Job
from gen.core.errors import GenError, unknown
from gen.jobs.progress.report import Silent
from gen.jobs.rank import process_rank
from gen.jobs.types import Report
from gen.store.ledger import read_plan, read_rows


@dataclass(frozen=True)
class Tally:
    """State of a job: its items, and attempt and status of the finished ones."""

    items: int
    rows: Mapping[str, tuple[Any, str]]

    @property
    def left(self) -> int:
        """Number of items that are not finished."""
        return self.items - len(self.rows)

    def since(self, before: Tally, stopped: bool) -> Report:
        """Report the items made after ``before``."""
        new = [
            status
            for i, (attempt, status) in self.rows.items()
            if before.rows.get(i) != (attempt, status)
        ]
        return Report(
            made=new.count("ok"), failed=new.count("failed"), stopped=stopped and self.left > 0
        )


def tally(folder: Path, items: int | None = None) -> Tally:
    """Count a job; ``items`` is their number if known, since the plan of a large job takes a
    while to read."""
    rows = {r["id"]: (r.get("attempt"), r["status"]) for r in read_rows(folder)}
    return Tally(len(read_plan(folder)["items"]) if items is None else items, rows)


class Begun(Silent):
    """Progress that was started already, for callees that would start it again."""

    def __init__(self, progress: Silent):
        self.batch, self.step, self.items = progress.batch, progress.step, progress.items
        self.again, self.note = progress.again, progress.note


def checked(engine: str, options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Copy ``engine_options``. Raises ``GenError`` for an option that the engine does not have."""
    known = list(known)
    for key in options:
        if key not in known:
            raise unknown(f"engine option of {engine}", key, known)
    return dict(options)


def refuse_launched(engine: str) -> None:
    """Refuse engines that start workers themselves in a process that a launcher started several
    times."""
    here = process_rank()
    if here.launched:
        raise GenError(
            f"engine {engine} in a process that {here.by} started as one of {here.world}; expected"
            " it alone, since it starts its workers itself (engine local takes the processes of a"
            " launcher as its workers)"
        )


def refuse_load(engine: str, load: Any) -> None:
    """Refuse the caller's own loader, which lives in this process only."""
    if load is not None and load.__module__ != "gen.pipeline.pipeline":
        raise GenError(
            f"a load function is given with engine {engine} and workers in other processes,"
            " which load models by their names; expected engine local with workers=1"
        )


def wants_cuda(job: Job) -> bool:
    """Return True if an entry runs on ``cuda``."""
    return any(e.device == "cuda" for e in job.entries)


def ended(folder: Path, before: Tally, stopped: bool, what: str, reasons: Iterable[str]) -> Report:
    """Report a job whose workers have all ended.

    Raises:
        GenError: if work is left and no stop was requested, ``all 2 workers ended with 5 of 9
            items left: ...``; every reason once.
    """
    after = tally(folder, before.items)
    if after.left and not stopped:
        said = "; ".join(dict.fromkeys(r for r in reasons if r)) or "no reason given"
        raise GenError(
            f"{what} ended with {after.left} of {after.items} items left: {said}. Finished items"
            " are kept; run the same command to resume"
        )
    return after.since(before, stopped)
