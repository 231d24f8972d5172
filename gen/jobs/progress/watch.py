"""Progress of a job folder that other processes write into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gen.core.clock import SteadyClock, pause
from gen.jobs.progress.report import Silent
from gen.store.row_counts import Cache, counts


def watch(
    folder: str | Path, progress: Silent, stop: Callable[[], bool], *, every: float = 1.0
) -> None:
    """Show what other processes put into a job folder, until ``stop()`` is true; then looks a last
    time. Starts ``progress`` and leaves closing it to the caller. ``every``: seconds between two
    looks."""
    folder, cache, label = Path(folder), Cache(), ""
    told: dict[str, Any] | None = None  # every item's row, as it was at the last look
    while True:
        last = stop()
        now = counts(folder, cache)
        if told is None and now.total:
            progress.start(now.total, now.ok + now.failed)
        elif told is not None:
            if now.sampler != label:
                label = now.sampler
                progress.batch(label, 0)
            made = [row for i, row in cache.rows.items() if not row.due and told.get(i) != row]
            again = sum(not r.due for r in told.values()) + len(made) - (now.ok + now.failed)
            if again:
                progress.again(again)
            if made:
                progress.items(
                    len(made), failed=sum(not r.ok for r in made), nfe=sum(r.nfe for r in made)
                )
        if now.total:
            told = cache.rows
        if last:
            return
        clock = SteadyClock()
        while not stop() and clock() < every:
            pause(0.05)
