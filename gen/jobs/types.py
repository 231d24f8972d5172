"""Types that the parts of a job share: an item at work, the state of a worker and its report,
reasons to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gen.config.entries import Entry, Job
from gen.jobs.progress.report import Silent
from gen.pipeline.memory import BatchSizes
from gen.store.claims import Claims
from gen.store.joblog import JobLog


class Stopped(Exception):
    """Raised between two microbatches when the worker was asked to stop."""


class Lost(Exception):
    """Raised when another worker has taken the shard over."""


@dataclass(frozen=True)
class Work:
    """Item in work.

    Attributes:
        item: the item as the plan lists it.
        entry: the entry of the item with the overrides of its input row.
        label: name of the sampler in manifest and gallery.
        plan: the pipeline's own plan of the item; None if none is needed.
        trace: True if decoding steps are recorded.
        attempt: 1 for the first attempt, one more for every retry.
        guarantee: the guarantee of the item's sampler.
        at_once: number of items decoded together; None for all of the output.
    """

    item: dict[str, Any]
    entry: Entry
    label: str
    plan: Any
    trace: bool
    attempt: int
    guarantee: str
    at_once: int | None = None


@dataclass
class Report:
    """Result of a worker: items ``made`` and ``failed``, and whether it ``stopped`` on request
    before all was done."""

    made: int = 0
    failed: int = 0
    stopped: bool = False


class WorkerState(Protocol):
    """State of a worker that its microbatches and its writer use."""

    folder: Path
    plan: dict[str, Any]
    job: Job
    tars: bool
    name: str
    progress: Silent
    stop: Callable[[], bool]
    log: JobLog
    claims: Claims
    report: Report
    sizes: BatchSizes
    proven: set[int]

    def pipe(self, number: int) -> Any:
        """Return the pipeline of an entry, loaded on first use."""
