"""Layout ``shards``: media in tars as WebDataset lays them out, a file of rows beside each.

A tar is written whole from the media of its shard and renamed; the rows follow last, and with the
size and digest of the tar they are its commit. A tar holds, per item, members with one stem: the
output, ``.json`` and what else belongs to it. Times, owners and the order are fixed, so the same
media give the same tar.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gen.core.files import put, read_regular, sha256, writing
from gen.core.processes import worker_name
from gen.store.ledger import SHARDS, Journal, Row, due_again, parse_rows, shard_folder
from gen.store.manifest import joined, publish
from gen.store.sealed import seal

OF_TAR = ("shard_sha256", "shard_bytes")  # what a row says of its tar, and only once that is there


def is_committed(folder: Path, shard: int, lines: dict[str, Row]) -> bool:
    """Return True if the rows beside the tar are those that count."""
    rows = {r["id"]: r for r in parse_rows(folder / SHARDS / f"{shard:05d}.jsonl", [])}
    return rows.keys() == lines.keys() and all(
        rows[i].get("attempt") == r.get("attempt") for i, r in lines.items()
    )


class Missing(Exception):
    """Raised for rows whose files are not all there, or whose output has another digest: made by
    another worker, or altered since."""

    def __init__(self, rows: list[Row]):
        self.rows = rows


def commit_shard(folder: Path, plan: dict[str, Any], shard: int, lines: dict[str, Row]) -> None:
    """Make the tar of a finished shard, and then its rows. An item whose output differs from its
    row is marked to be made again, and nothing else is done."""
    first, end = plan["shards"][shard]
    rows = [
        {k: v for k, v in lines[i["id"]].items() if k not in OF_TAR}
        for i in plan["items"][first:end]
    ]
    source, tar, table = (
        shard_folder(folder, shard),
        folder / SHARDS / f"{shard:05d}.tar",
        folder / SHARDS / f"{shard:05d}.jsonl",
    )
    with writing(tar):
        tar.parent.mkdir(exist_ok=True)
    journal = Journal(folder, shard, worker_name())
    if tar.is_file():
        # it is about to change: its rows go first, so that nobody reads those of one tar beside the
        # other
        journal.add(rows)
        with writing(table):
            table.unlink(missing_ok=True)
        publish(folder, plan)
    try:
        put(tar, lambda temporary: _write(temporary, rows, source, tar))
    except Missing as missing:
        journal.add(map(due_again, missing.rows))
        return
    said = dict(zip(OF_TAR, (sha256(tar), tar.stat().st_size), strict=True))
    rows = [{**r, **(said if r["status"] == "ok" else {})} for r in rows]
    put(table, lambda temporary: temporary.write_bytes(b"".join(seal(r) for r in rows)))
    shutil.rmtree(source, ignore_errors=True)


@contextmanager
def _opened(tar: Path) -> Iterator[tarfile.TarFile | None]:
    """``None`` if there is no tar, or what is there is none."""
    if not tar.is_file():  # a pipe waits for ever
        yield None
        return
    try:
        archive = tarfile.open(tar)  # noqa: SIM115 - closed by the caller's with
    except (OSError, tarfile.TarError):
        yield None
        return
    with archive:
        yield archive


def _write(path: Path, rows: list[Row], source: Path, old: Path) -> None:
    """Raises ``Missing``."""
    missing = []
    with _opened(old) as kept, tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for row in rows:
            if row["status"] != "ok":
                continue
            tokens = [row["tokens_file"]] if "tokens_file" in row else []
            names = [
                row["member"],
                *row.get("also", ()),
                *tokens,
                f"{Path(row['member']).stem}.json",
            ]
            files = [_content(source / n, kept, n) for n in names]
            medium, *beside = [hashlib.sha256(data or b"").hexdigest() for data in files]
            if None in files or (medium, joined(beside)) != (
                row["sha256"],
                row.get("beside_sha256"),
            ):
                missing.append(row)
                continue
            for name, data in zip(names, files, strict=True):
                _add(archive, name, data)
    if missing:
        raise Missing(missing)


def _content(path: Path, kept: tarfile.TarFile | None, name: str) -> bytes | None:
    try:
        return read_regular(path)
    except FileNotFoundError:
        pass
    try:
        return kept.extractfile(name).read() if kept is not None else None
    except (KeyError, tarfile.TarError):
        return None


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 0, 0o644
    archive.addfile(info, io.BytesIO(data))
