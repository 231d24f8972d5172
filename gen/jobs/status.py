"""Progress of a job folder, seen from outside while others write into it: ``gen status DIR``.

Reads and writes nothing. A file that goes away or is replaced meanwhile is normal: its content
has gone into one that is read later.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gen.core.clock import SteadyClock, pause
from gen.core.printable import printable
from gen.core.processes import is_dead
from gen.core.tables import EMPTY, columns
from gen.jobs.progress.report import duration, speed
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.progress.watch import watch
from gen.store.claims import STALE, read_claim
from gen.store.joblog import recent
from gen.store.ledger import CLAIMS, WORK, read_plan, read_rows, require_job
from gen.store.row_counts import Cache, Counts, counts

__all__ = ["Cache", "Counts", "counts", "status", "status_of"]

WINDOW = 300.0  # seconds of work that the pace is taken from
ERRORS, QUIET, EVERY = (
    5,
    60.0,
    5.0,
)  # errors told; seconds without a run after which a watch ends; seconds between two reports of one
OVER = ("stop", "done")  # the last event of a worker that has gone home


# --- the command


def status(args: argparse.Namespace) -> int:
    """Carry out ``gen status``; return the exit code."""
    folder = require_job(args.folder)
    if args.watch:
        try:
            (_watch_json if args.json else _watch)(folder)
        except KeyboardInterrupt:  # the way to leave it
            if args.json:
                return 0
    report = status_of(folder)
    # one report per line where there are several
    text = (
        json.dumps(report, ensure_ascii=False, indent=None if args.watch else 2)
        if args.json
        else text_of(report)
    )
    print(printable(text))
    return 0


def _watch(folder: Path) -> None:
    progress = for_terminal()
    try:
        watch(folder, progress, Over(folder))
    finally:
        progress.close()


def _watch_json(folder: Path) -> None:
    """Print one report per line; the caller prints the last one."""
    over = Over(folder)
    while not over():
        print(printable(json.dumps(status_of(folder), ensure_ascii=False)), flush=True)
        clock = SteadyClock()
        while clock() < EVERY and not over():
            pause(0.1)


class Over:
    """Test for the end of a watch: everything is made, or no worker has been at work for a
    minute."""

    EVERY = 2.0  # seconds between two looks

    def __init__(
        self, folder: Path, quiet: float = QUIET, clock: Callable[[], float] = time.monotonic
    ):
        self.folder, self.quiet, self.clock, self.cache = folder, quiet, SteadyClock(clock), Cache()
        self.looked, self.heard, self.over = float("-inf"), self.clock(), False

    def __call__(self) -> bool:
        now = self.clock()
        if now - self.looked >= self.EVERY:
            self.looked = now
            there = counts(self.folder, self.cache)
            at_work = any(w["state"] == "alive" for w in workers(self.folder))
            self.heard = now if at_work else self.heard
            all_made = there.total > 0 and there.ok + there.failed >= there.total
            self.over = not at_work and (all_made or now - self.heard >= self.quiet)
        return self.over


def text_of(report: dict[str, Any]) -> str:
    """Format a report for people."""
    states = ("items", "ok", "failed", "pending")
    words = [f"{report['ok']} ok", f"{report['failed']} failed", f"{report['pending']} pending"]
    lines = [f"{report['folder']}: {report['items']} items, {', '.join(words)}", _now(report)]
    for key in ("by_sampler", "by_modality"):
        groups = report[key]
        if key == "by_sampler" or len(groups) > 1:
            lines += [
                "",
                columns(
                    [
                        (key[3:], *states),
                        *((name, *(str(g[s]) for s in states)) for name, g in groups.items()),
                    ]
                ),
            ]
    if report["workers"]:

        def show(value):
            return EMPTY if value is None else str(value)

        keys = ("worker", "shard", "host", "state")
        lines += [
            "",
            columns([keys, *(tuple(show(w[k]) for k in keys) for w in report["workers"])]),
        ]
    if report["errors"]:
        lines += ["", "last errors"]
        for e in reversed(report["errors"]):
            lines.append(
                f"{e['count']} failed: {e['error']}"
                f" ({'' if e['count'] == 1 else 'the last one '}{e['id']} {e['prompt']!r})"
            )
    return "\n".join(lines)


def _now(report: dict[str, Any]) -> str:
    alive = sum(w["state"] == "alive" for w in report["workers"])
    forwards, left = report["forwards_per_item"], report["seconds_left"]
    mean = "" if forwards is None else f"{forwards:.1f} forward passes/item"
    if report["at_work"]:
        words = [
            f"{alive} worker{'s' * (alive > 1)}",
            speed(report["items_per_second"]),
            mean,
            "" if left is None else f"{duration(left)} left",
        ]
        return "running: " + ", ".join(w for w in words if w)
    state = (
        f"no run is active; gen run with the same job resumes, or gen work {report['folder']}"
        if report["pending"]
        else "all done"
    )
    return ", ".join(w for w in (state, mean) if w)


# --- a report


def status_of(folder: str | Path) -> dict[str, Any]:
    """``items`` planned, of which ``ok``, ``failed`` and ``pending``, the same ``by_sampler`` and
    ``by_modality``, the last ``errors``, the ``workers``, whether a run is ``at_work``, and of such
    a one ``items_per_second``, ``forwards_per_item`` and ``seconds_left`` (``None`` where unknown).
    Raises ``GenError`` for a folder that holds no job."""
    folder = require_job(folder)
    plan, logs = read_plan(folder), living_logs(folder)
    rows = {r["id"]: r for r in read_rows(folder)}
    entries = plan["relevant"].get("entries") or []
    groups = {key: {} for key in ("by_sampler", "by_modality")}
    count: Counter = Counter()
    for item in plan["items"]:
        row = rows.get(item["id"])
        state = row["status"] if row and row.get("status") in ("ok", "failed") else "pending"
        count[state] += 1
        e = item["entry"]
        names = (
            plan["labels"][e],
            (entries[e].get("modality") if e < len(entries) else None)
            or (row or {}).get("modality")
            or "unknown",
        )
        for group, name in zip(groups.values(), names, strict=True):
            one = group.setdefault(name, {"items": 0, "ok": 0, "failed": 0, "pending": 0})
            one["items"] += 1
            one[state] += 1
    found = workers(folder, logs)
    alive = {w["worker"] for w in found if w["state"] == "alive"}
    rate, forwards = pace({name: events for name, events in logs.items() if name in alive})
    done = [
        r["nfe"]
        for r in rows.values()
        if r.get("status") == "ok" and isinstance(r.get("nfe"), (int, float))
    ]
    return {
        "folder": str(folder),
        "items": len(plan["items"]),
        **{k: count[k] for k in ("ok", "failed", "pending")},
        **groups,
        "at_work": bool(alive),
        "workers": found,
        "items_per_second": rate,
        "forwards_per_item": (
            forwards if forwards is not None else sum(done) / len(done) if done else None
        ),
        "seconds_left": count["pending"] / rate if rate else None,
        "errors": errors_of(rows.values()),
    }


def workers(folder: Path, logs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """List the workers with a claim or a log that is still being written.

    Returns:
        ``worker``, ``host``, ``pid``, ``shard`` (None: none right now) and ``state``: ``alive``,
            ``gone`` (its process has ended; another worker takes its shard over), or ``silent``
            (on another machine, and not heard of for a minute).
    """
    found, seen = [], set()
    try:
        names = sorted(os.listdir(folder / WORK / CLAIMS))
    except OSError:
        names = []
    for name in names:
        path = folder / WORK / CLAIMS / name
        said = {} if name.startswith(".") else read_claim(path)
        if said and "worker" in said:
            seen.add(said["worker"])
            found.append(
                {
                    "worker": said["worker"],
                    "host": said.get("host"),
                    "pid": said.get("pid"),
                    "shard": int(name) if name.isdigit() else name,
                    "state": _state(said["worker"], _written(path)),
                }
            )
    for worker, events in (living_logs(folder) if logs is None else logs).items():
        if (
            worker not in seen and events[-1]["event"] not in OVER
        ):  # loading a model, or between two shards
            found.append(
                {
                    "worker": worker,
                    "host": events[0].get("host"),
                    "pid": events[0].get("pid"),
                    "shard": None,
                    "state": "alive",
                }
            )
    return found


def living_logs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the latest events of every worker that is alive, as far as one can tell."""
    return recent(folder, lambda worker, written: _state(worker, written) == "alive")


def pace(logs: dict[str, list[dict[str, Any]]]) -> tuple[float | None, float | None]:
    """Items per second of all these workers together and forward passes per item, over the last
    five minutes of each one's own time."""
    rate = items = nfe = 0.0
    for events in logs.values():
        now = events[-1].get("elapsed", 0.0)
        batches = [
            e
            for e in events
            if e["event"] == "batch"
            and e.get("elapsed", 0.0) > now - WINDOW
            and e.get("items")
            and not e.get("error")
        ]
        if batches:
            first = batches[0]
            span = now - max(0.0, first["elapsed"] - (first.get("seconds") or 0.0))
            made = sum(e["items"] for e in batches)
            rate += made / span if span > 0 else 0.0
            if all(e.get("nfe") is not None for e in batches):
                items, nfe = items + made, nfe + sum(e["nfe"] for e in batches)
    return rate or None, nfe / items if items else None


def errors_of(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the last few different errors: ``error``, the ``count`` of its items, and the last of
    them (``id``, ``index``, ``prompt``)."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("status") == "failed":
            error = str(row.get("error"))
            count = found.get(error, {"count": 0})["count"] + 1
            found[error] = {
                "error": error,
                "count": count,
                "id": row["id"],
                "index": row.get("index"),
                "prompt": row.get("prompt"),
            }
    return sorted(found.values(), key=lambda e: e["index"] if isinstance(e["index"], int) else -1)[
        -ERRORS:
    ]


def _state(worker: str, written: float | None) -> str:
    dead = is_dead(worker)
    if dead is not None:
        return "gone" if dead else "alive"
    # of another machine: only its files can tell, and a clock that was set is the worst that can
    # mislead a display
    return "alive" if written is None or time.time() - written < STALE else "silent"


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
