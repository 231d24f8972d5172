"""Counting what is finished in a job folder, cheaply enough to be asked every second while others
write into it.

A file that goes away or is replaced meanwhile is a normal thing: rows move from journals to shards
to the manifest, and are looked for in that order.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gen.core.errors import GenError
from gen.store.ledger import MANIFEST, PLAN, RANK, SHARDS, WORK, read_plan
from gen.store.sealed import unseal


class Seen(NamedTuple):
    """Part of a row that is kept. Of two about one item the greater one counts."""

    attempt: int
    turn: int
    rank: int
    nfe: float

    @property
    def ok(self) -> bool:
        return self.rank == RANK["ok"]

    @property
    def due(self) -> bool:
        return self.rank == RANK["due"]


@dataclass(frozen=True)
class Counts:
    """``nfe``: forward passes of all finished items. ``sampler``: of the row that was read last."""

    ok: int = 0
    failed: int = 0
    total: int = 0
    nfe: float = 0.0
    sampler: str = ""


File = tuple[
    Any, int, dict[int, tuple[str, Seen]]
]  # stamp, how far it was read, rows by the hash of their line
NOTHING: File = (None, 0, {})


@dataclass
class Cache:
    """Results of earlier looks; ``rows`` holds the row that counts of every item that has one."""

    plan: Any = None
    ids: frozenset[str] = frozenset()
    files: dict[str, File] = field(default_factory=dict)
    rows: dict[str, Seen] = field(default_factory=dict)
    counts: Counts = Counts()
    sampler: str = ""


def counts(folder: str | Path, cache: Cache) -> Counts:
    """Count the rows of a job. The call is cheap enough for every second: it reads only new parts
    of journals and parses only new lines of the manifest. A folder without a plan counts
    nothing."""
    folder = Path(folder)
    stamp = _stamp(folder / PLAN)
    if stamp != cache.plan:
        cache.__init__()
        if stamp is None:
            return cache.counts
        try:
            cache.ids = frozenset(item["id"] for item in read_plan(folder)["items"])
        except GenError:  # gone again
            return cache.counts
        cache.plan = stamp
    files, changed = {}, False
    for path, known in _listed(folder):  # in the order in which rows move, so that none is missed
        was = cache.files.get(path)
        files[path] = now = (
            was if was and known is not None and was[0] == known else _read(path, known, was, cache)
        )
        changed |= now is not was
    if changed or len(files) != len(cache.files) or cache.counts.total != len(cache.ids):
        cache.files, rows, ids = files, {}, cache.ids
        for _, _, lines in files.values():
            for i, row in lines.values():
                old = rows.get(i)
                if (old is None or row > old) and i in ids:
                    rows[i] = row
        ranks = [row.rank for row in rows.values()]
        nfe = sum(row.nfe for row in rows.values() if not row.due)
        cache.rows, cache.counts = (
            rows,
            Counts(
                ranks.count(RANK["ok"]), ranks.count(RANK["failed"]), len(ids), nfe, cache.sampler
            ),
        )
    return cache.counts


def _listed(folder: Path) -> list[tuple[str, Any]]:
    """List the files with rows, and a stamp of those that are written once."""
    found: list[tuple[str, Any]] = []
    for name in (WORK, SHARDS):
        try:
            with os.scandir(folder / name) as listing:
                found += sorted(
                    (e.path, e.inode() if name == SHARDS else None)
                    for e in listing
                    if e.name.endswith(".jsonl") and not e.name.startswith(".")
                )
        except OSError:
            continue
    return [*found, (str(folder / MANIFEST), None)]


def _read(path: str, known: Any, was: File | None, cache: Cache) -> File:
    """The rows of a file, by the hash of their lines. Only journals are added to; anything else is
    replaced as a whole."""
    journal = os.path.basename(os.path.dirname(path)) == WORK
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            stamp = known if known is not None else (about.st_ino, about.st_size, about.st_mtime_ns)
            if was and was[0] == stamp:
                return was
            added = journal and was and was[0][0] == stamp[0] and was[1] <= about.st_size
            file.seek(was[1] if added else 0)
            data = file.read()
    except OSError:
        return NOTHING
    end = data.rfind(b"\n") + 1
    before = was[2] if was else {}
    lines = dict(before) if added else {}
    for line in data[:end].split(b"\n")[:-1]:
        key = hash(line)
        row = before.get(key) or _seen(line, cache)
        if row:
            lines[key] = row
    return stamp, (was[1] if added else 0) + end, lines


def _seen(line: bytes, cache: Cache) -> tuple[str, Seen] | None:
    try:
        row = json.loads(unseal(line) or b"")
        rank = RANK[row["status"]]
        cache.sampler = row.get("sampler") or cache.sampler
        order = row.get("attempt") or 0, row.get("turn") or 0, rank
        return row["id"], Seen(*order, row.get("nfe") or 0.0)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # a broken line: the run itself says so
        return None


def _stamp(path: Path) -> Any:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns
