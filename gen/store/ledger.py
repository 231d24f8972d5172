"""Ledger of a job folder: which items count as done, and the order of writes that makes them so.

The order of a commit: media under a temporary name, fsync, rename, fsync of the folder, then one
line of a journal, fsynced. The line is the commit of an item. A crash at any point leaves a
temporary file (removed later), a media file without a line (made again, same name), or a torn last
line (dropped). Every worker has journals of its own, one per shard, so no worker waits for another
and nothing interleaves. ``manifest.jsonl`` is their sum in the order of the plan, replaced in one
step.

Of several lines about one item, the one with the highest ``attempt`` counts, among those the one of
the latest claim (``turn``), and among those ``due`` (make the item again) before ``ok`` before
``failed``. Retrying and mending are lines as well, and no line is ever taken back.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import open_regular, read_regular, reading, writing
from gen.store.sealed import Damaged, parse, parse_plan, problem_of, seal, unseal

MANIFEST, CONFIG, PLAN, CHECK, GALLERY = (
    "manifest.jsonl",
    "config.yaml",
    "plan.json",
    "check.json",
    "index.html",
)
TRACES, INPUTS, LOGS, SHARDS, WORK, CLAIMS = "traces", "inputs", "logs", "shards", "_work", "claims"
WINDOWS = "windows"
RUNTIME = (
    "attempt",
    "turn",
    "seconds",
    "batch",
    "worker",
    "trace_sha256",  # a run may trace more items than the last one
)  # the fields of a row that differ from run to run
MADE_AGAIN = "gen run with the same job makes its item again"
RANK = {"failed": 0, "ok": 1, "due": 2}
Row = dict[str, Any]


def due_again(row: Row) -> Row:
    """Build the line that has an item made again."""
    kept = {k: row[k] for k in ("id", "index", "attempt", "turn") if k in row}
    return {**kept, "status": "due"}


class Journal:
    """Lines of one worker about one shard."""

    def __init__(self, folder: Path, shard: int, worker: str):
        self.path = folder / WORK / f"{shard:05d}.{worker}.jsonl"

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows durably; lines that do not fit on the disk are taken back."""
        rest = b"".join(seal(r) for r in rows)
        with writing(self.path):
            self.path.parent.mkdir(exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(handle).st_size
                try:
                    if size and _last_byte(self.path) != b"\n":
                        os.ftruncate(handle, size := _whole(self.path))
                    while rest:
                        rest = rest[os.write(handle, rest) :]
                    os.fsync(handle)
                except OSError:
                    os.ftruncate(handle, size)
                    raise
            finally:
                os.close(handle)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _whole(path: Path) -> int:
    """Return the length of a file up to its last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


# --- reading


def parse_rows(path: Path, damage: list[Damaged] | None = None) -> list[Row]:
    """Parse a file of lines.

    Args:
        path: a journal, a table of rows beside a tar, or the manifest. A torn last line of a
            journal is what a crash leaves, and no row.
        damage: takes the damaged lines, whose items are then made again.

    Raises:
        Damaged: for the first damaged line, unless ``damage`` is given.
    """
    try:
        *lines, torn = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    found: list[Damaged] = []
    whole: list[tuple[int, bytes]] = []

    def damaged(number: int, what: str) -> None:
        found.append(Damaged(path, number, what, MADE_AGAIN))

    for number, text in enumerate(lines, 1):
        body = unseal(text)
        if body is None:
            damaged(number, "its checksum does not fit")
        else:
            whole.append((number, body))
    if torn and path.parent.name != WORK:
        damaged(len(lines) + 1, "it is cut")
    # all in one go is a third faster
    rows, wrong = parse(b"[" + b",".join(text for _, text in whole) + b"]")
    parsed = [(row, None) for row in rows] if wrong is None else [parse(text) for _, text in whole]
    good = []
    for (number, _), (row, wrong) in zip(whole, parsed, strict=True):
        if wrong := wrong or problem_of(row):
            damaged(number, wrong)
        else:
            good.append(row)
    if found and damage is None:
        raise found[0]
    if damage is not None:
        damage += found
    return good


def journals(folder: Path, shard: int | None = None) -> list[Path]:
    """List the journals of one shard, or of all."""
    return _listed(folder / WORK, "[0-9]*.jsonl" if shard is None else f"{shard:05d}.*.jsonl")


def tables(folder: Path) -> list[Path]:
    """List the tables of rows beside the tars."""
    return _listed(folder / SHARDS, "[0-9]*.jsonl")


def _listed(folder: Path, pattern: str) -> list[Path]:
    """List files by name; none if there is no such folder, or none any more: the journals of a
    complete job go while others look for them."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(fnmatch.filter(names, pattern))]


def better(new: Row, old: Row | None) -> bool:
    """Return True if one line about an item counts more than another."""

    def weight(row):
        return (
            row.get("attempt") or 0,
            row.get("turn") or 0,
            RANK.get(row.get("status"), 0),
            "shard_sha256" in row,
        )

    return old is None or weight(new) > weight(old)


def latest(rows: Iterable[Row], into: dict[str, Row] | None = None) -> dict[str, Row]:
    """Collect the line that counts of every item, into ``into`` if given."""
    found = {} if into is None else into
    for row in rows:
        if better(row, found.get(row["id"])):
            found[row["id"]] = row
    return found


def lines_of(folder: Path, damage: list[Damaged] | None = None) -> dict[str, Row]:
    """Collect the line that counts of every item, ``due`` lines included. Journals are read
    before their targets, so that a reader beside a running job misses nothing. ``damage``: see
    `parse_rows`."""
    found: dict[str, Row] = {}
    for path in ledger_files(folder):
        latest(parse_rows(path, damage), found)
    return found


def ledger_files(folder: Path) -> Iterator[Path]:
    """Yield all files of rows, in the order in which rows move: journals, tables, manifest."""
    yield from journals(folder)
    yield from tables(folder)
    yield folder / MANIFEST


def read_rows(folder: Path) -> list[Row]:
    """Read the finished items in the order of the plan, from the manifest and from journals that
    are not in it yet."""
    rows = [
        {k: v for k, v in r.items() if k != "turn"}
        for r in lines_of(folder).values()
        if r.get("status") != "due"
    ]
    return sorted(rows, key=lambda r: (r.get("index", 0), r["id"]))


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; ``{}`` if there is no such file."""
    try:
        tree, wrong = parse(read_regular(path))
    except FileNotFoundError:
        return {}
    if wrong:
        raise GenError(f"{path} is damaged: {wrong}; remove it and resume")
    return tree if isinstance(tree, dict) else {}


def read_sealed(path: Path, hint: str) -> dict[str, Any]:
    """Read an object that was written with its checksum; ``{}`` if there is no such file.

    Args:
        path: the file.
        hint: what makes it again, for the message.

    Raises:
        Damaged: the file is not as it was written.
    """
    try:
        body = unseal(read_regular(path).removesuffix(b"\n"))
    except FileNotFoundError:
        return {}
    tree, wrong = (None, "its checksum does not fit") if body is None else parse(body)
    if wrong or not isinstance(tree, dict):
        raise Damaged(path, 1, wrong or "it holds no object", hint)
    return tree


def read_verdicts(folder: Path) -> dict[str, Any]:
    """Read the verdicts of ``gen check``, by item; ``{}`` if it did not run."""
    return read_sealed(folder / CHECK, f"gen check {folder} makes it again")


def trace_path(folder: Path, row: Row) -> Path:
    """Return the file of the decoding steps of an item."""
    return folder / TRACES / f"{row['id']}.json"


def read_plan(folder: Path) -> dict[str, Any]:
    """Read the plan of a job. Raises ``GenError`` if the folder holds none, and ``Damaged`` for
    one that is not as it was written."""
    try:
        data = read_regular(folder / PLAN)
    except FileNotFoundError:
        raise GenError(
            f"{folder} holds no {PLAN}; expected a folder that gen run or gen sample wrote"
        ) from None
    return parse_plan(folder / PLAN, data)


def holds(folder: Path, plan: dict[str, Any]) -> bool:
    """Return True if the folder still holds this plan; its head is enough to tell."""
    try:
        with reading(folder / PLAN), open_regular(folder / PLAN) as file:
            return plan["fingerprint"].encode() in file.read(200)
    except FileNotFoundError:
        return False


def is_job(folder: Path) -> bool:
    """Return True if the folder holds a plan."""
    return (folder / PLAN).is_file()


def require_job(folder: str | Path) -> Path:
    """Return the folder as a path. Raises ``GenError`` if it holds no job."""
    folder = Path(folder)
    if not folder.is_dir():
        raise GenError(f"{folder} is not a folder; expected one that gen run or gen sample wrote")
    if not is_job(folder):
        raise GenError(
            f"{folder} holds no {PLAN}; expected a folder that gen run or gen sample wrote"
        )
    return folder


# --- media


def inside(folder: Path, row: Row) -> Path | None:
    """Return the media file of a row, or its shard; None if the row names none in this very
    folder, or if a link lies there, which may lead anywhere."""
    name = row.get("file")
    if not isinstance(name, str) or not name:
        return None
    bare = name.removeprefix(f"{SHARDS}/") if "member" in row else name
    path = folder / name
    return None if Path(bare).name != bare or is_link(path) else path


def is_link(path: Path) -> bool:
    """Return True for a link, and for a file in a shard's folder that is one."""
    return path.is_symlink() or (path.parent.name == SHARDS and path.parent.is_symlink())


def companions(folder: Path, row: Row) -> list[Path]:
    """List the further files of a row's output, in layout ``files``."""
    return (
        [] if "member" in row else [folder / Path(str(name)).name for name in row.get("also") or ()]
    )


def shard_folder(folder: Path, shard: int) -> Path:
    """Return the folder that holds the media of a shard until it is a tar."""
    return folder / WORK / f"{shard:05d}"
