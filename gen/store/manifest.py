"""Manifest made from journals, and the items to be made again.

``manifest.jsonl`` is derived: at any time it can be made anew from the journals (and, in layout
``shards``, from the rows beside the tars). It is replaced under a lock, so that nobody who looked
earlier replaces it later. Where a file system has no locks only the complete manifest is written,
which is the same regardless of the writer. The journals go when everything is in the manifest.
"""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import put, sha256, sweep_temporaries, writing
from gen.core.processes import is_dead, worker_name
from gen.store.claims import locked, read_claim
from gen.store.ledger import (
    CHECK,
    CLAIMS,
    CONFIG,
    GALLERY,
    LOGS,
    MANIFEST,
    PLAN,
    SHARDS,
    TRACES,
    WINDOWS,
    WORK,
    Journal,
    Row,
    better,
    companions,
    due_again,
    holds,
    inside,
    journals,
    latest,
    ledger_files,
    lines_of,
    parse_rows,
    tables,
    trace_path,
)
from gen.store.sealed import Damaged, seal


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Lock the folder; yields False where the system has no locks."""
    with ExitStack() as stack:
        with writing(folder):
            safe = stack.enter_context(locked(folder))
        yield bool(safe)


def publish(folder: Path, plan: dict[str, Any]) -> bool:
    """Bring the manifest up to date; returns whether every item of the plan is in it.

    Raises ``GenError`` if the folder holds another job by now.
    """
    with alone(folder) as safe:
        if not holds(folder, plan):
            raise GenError(
                f"{folder} now holds another job; another process has overwritten the job of this"
                " worker"
            )
        rows, complete = _committed(folder, plan)
        if not complete and not safe:
            return False
        text = b"".join(seal(r) for r in sorted(rows, key=lambda r: r["index"]))
        path = folder / MANIFEST
        with writing(path):
            if not path.is_file() or path.read_bytes() != text:
                put(path, lambda temporary: temporary.write_bytes(text))
            for part in (folder, folder / TRACES, folder / SHARDS):
                sweep_temporaries(part)
        if complete:
            shutil.rmtree(folder / WORK, ignore_errors=True)
        return complete


def _committed(folder: Path, plan: dict[str, Any]) -> tuple[list[Row], bool]:
    """The rows of the manifest, and whether nothing is left to do: in layout shards a line may be
    newer than its tar. Damaged lines are none: their items are made again."""
    damage: list[Damaged] = []
    if plan["relevant"].get("layout") == "shards":
        newest: dict[str, Row] = {}
        for path in journals(folder):  # before the tables, since lines go from there to here
            latest(parse_rows(path, damage), newest)
        rows = [r for p in tables(folder) for r in parse_rows(p, damage)]
        behind = any(better(newest[r["id"]], r) for r in rows if r["id"] in newest)
        return rows, len(rows) == len(plan["items"]) and not behind
    lines = lines_of(folder, damage)
    rivals: dict[str, list[Row]] = {}
    shared = Counter(path.name.partition(".")[0] for path in journals(folder))
    for path in (p for p in journals(folder) if shared[p.name.partition(".")[0]] > 1):
        for row in parse_rows(path, damage):
            won = lines.get(row["id"])  # none of a row that came just now
            if (
                won
                and row["status"] == won["status"] == "ok"
                and row["attempt"] == won["attempt"]
                and row.get("turn") == won.get("turn")
                and row["sha256"] != won["sha256"]
            ):
                rivals.setdefault(row["id"], []).append(row)
    # on a file system without locks two workers may have made it, and not to the bit: the one whose
    # file is there counts
    for name, others in rivals.items():
        lines[name] = next((r for r in [lines[name], *others] if _intact(folder, r)), lines[name])
    rows = [r for r in lines.values() if r["status"] != "due"]
    return rows, len(rows) == len(plan["items"])


def _intact(folder: Path, row: Row) -> bool:
    path = inside(folder, row)
    return path is not None and _digest(path) == row.get("sha256")


def _digest(path: Path) -> str | None:
    """``None`` where there is no file, or none any more: a worker beside us moves the media of a
    shard into its tar."""
    try:
        return sha256(path)
    except FileNotFoundError:
        return None


def shard_of(plan: dict[str, Any], index: int) -> int:
    return bisect_right([first for first, _ in plan["shards"]], index) - 1


def mark_due(folder: Path, plan: dict[str, Any], wanted: Callable[[Row], bool]) -> int:
    """Have those items made again that ``wanted`` picks of the finished ones; returns how many."""
    known = {i["id"] for i in plan["items"]}
    due: dict[int, list[Row]] = {}
    with alone(folder):  # so that nobody finds all complete in between and clears the journals away
        for row in lines_of(folder, []).values():
            if row["status"] != "due" and row["id"] in known and wanted(row):
                due.setdefault(shard_of(plan, row["index"]), []).append(due_again(row))
        for shard, marks in due.items():
            Journal(folder, shard, worker_name()).add(marks)
    return sum(map(len, due.values()))


def mend(folder: Path) -> list[Damaged]:
    """Drop damaged lines, whose items are then made again; returns them. A journal that a living
    worker may add to is left alone."""
    found: list[Damaged] = []
    with alone(folder):
        for path in ledger_files(folder):
            damage: list[Damaged] = []
            good = parse_rows(path, damage)
            worker = path.name.split(".")[1] if path.parent.name == WORK else ""
            if damage and (not worker or worker == worker_name() or is_dead(worker)):
                text = b"".join(seal(row) for row in good)
                put(path, lambda temporary, text=text: temporary.write_bytes(text))
            found += damage
    return found


def damaged(folder: Path, plan: dict[str, Any]) -> Callable[[Row], bool]:
    """Return a test of rows: True if the output is missing or altered, or not the one that the plan
    names."""
    stems = {i["id"]: i["stem"] for i in plan["items"]}
    tars: dict[Path, str | None] = {}

    def look(row: Row) -> bool:
        if row["status"] != "ok":
            return False
        path = inside(folder, row)
        if "trace_sha256" in row and _digest(trace_path(folder, row)) != row["trace_sha256"]:
            return True
        if path is None or Path(row.get("member") or row["file"]).stem != stems[row["id"]]:
            return True
        if "member" in row:
            at_work = None if path.is_file() else _digest(folder / WORK / path.stem / row["member"])
            if at_work is not None:  # its shard is no tar yet
                return at_work != row["sha256"]
            if path not in tars:
                tars[path] = _digest(path)
            return tars[path] is None or (
                "shard_sha256" in row and tars[path] != row["shard_sha256"]
            )
        beside = [
            *companions(folder, row),
            *([folder / row["tokens_file"]] if row.get("tokens_file") else []),
            path.with_suffix(".json"),
        ]
        return _digest(path) != row["sha256"] or digest_of(beside) != row.get("beside_sha256")

    return look


def digest_of(paths: list[Path]) -> str | None:
    """Return one digest of several files in their order; None if one is missing."""
    digests = [_digest(path) for path in paths]
    return None if None in digests else joined(map(str, digests))


def joined(digests: Iterable[str]) -> str:
    """Return one digest of several in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def remove_job(folder: Path, plan: dict[str, Any]) -> None:
    """Remove everything that this plan's job wrote, the plan itself last, so that an interrupted
    removal can be repeated."""
    for path in (folder / WORK / CLAIMS).glob("[0-9]*"):
        said = read_claim(path) or {}
        if is_dead(str(said.get("worker"))) is False:
            raise GenError(
                f"a worker (process {said.get('pid')}) is writing to {folder}; stop it before"
                " overwriting"
            )
    stems = {i["stem"] for i in plan["items"]}
    with writing(folder):
        for name in (MANIFEST, CHECK, GALLERY):
            (folder / name).unlink(missing_ok=True)
        for path in [*tables(folder), *journals(folder)]:  # rows before what they speak of
            path.unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name.partition(".")[0] in stems:
                path.unlink(missing_ok=True)
        for name in (WORK, SHARDS, TRACES, LOGS, WINDOWS, "preview", "gallery", "eval"):
            with suppress(FileNotFoundError):
                shutil.rmtree(folder / name)
        for name in (CONFIG, PLAN):
            (folder / name).unlink(missing_ok=True)


def settled(rows: dict[str, Row], ids: list[str]) -> bool:
    return all(rows.get(i, {}).get("status") in ("ok", "failed") for i in ids)
