"""The job folder: what counts as done, and how a file gets into the folder whole or not at all.

The order of a commit: media under a temporary name, fsync, rename, fsync of the folder, then one line of
``manifest.jsonl``, fsynced. The line is the commit. A crash at any point leaves either a temporary file (removed when
the folder is opened again), a media file without a line (made again, same name), or a torn last line (dropped).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gen.errors import GenError

MANIFEST, CONFIG, TRACES, CHECK, GALLERY = "manifest.jsonl", "config.yaml", "traces.json", "check.json", "index.html"
INPUTS = "inputs"  # what an edit started from
TEMPORARY = ".tmp-"


def slug(text: str, length: int = 40) -> str:
    """``A small blue ring!`` -> ``a-small-blue-ring``: what every file system takes, cut at a word."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if len(words) > length:
        words = words[: length + 1].rpartition("-")[0] or words[:length]
    return words or "item"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise GenError(f"cannot write {path}: {error.strerror or error}") from error


def put(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` makes the file under a temporary name beside ``path``, with the same extension; then it moves there."""
    temporary = path.with_name(TEMPORARY + path.name)
    with writing(path):
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def put_text(path: Path, text: str) -> None:
    put(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The manifest. A torn last line is no row; a broken line elsewhere is an error, since no crash makes one."""
    path = folder / MANIFEST
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise GenError(
                f"{path}, line {number} is no JSON; expected one row per line. Remove that line and resume"
            ) from error
    return [r for r in rows if isinstance(r, dict) and isinstance(r.get("id"), str)]


def read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise GenError(f"{path} is no JSON ({error}); remove it and resume") from error
    return tree if isinstance(tree, dict) else {}


def is_job(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def require_job(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise GenError(f"{folder} is no folder; expected one that gen run or gen sample wrote")
    if not is_job(folder):
        raise GenError(f"{folder} holds no {CONFIG}; expected a folder that gen run or gen sample wrote")
    return folder


def inside(folder: Path, row: dict[str, Any]) -> Path | None:
    """The media file of a row, or ``None`` if the row names none in this very folder."""
    name = row.get("file")
    return folder / name if isinstance(name, str) and name and Path(name).name == name else None


def companions(folder: Path, row: dict[str, Any]) -> list[Path]:
    """The further files of a row's medium."""
    return [folder / Path(str(name)).name for name in row.get("also") or ()]


class Ledger:
    """An open job folder: one writer at a time, one line per item. ``done``: rows whose media are there, by id."""

    def __init__(self, folder: Path, files: dict[str, str]):
        """``files``: the file name of every item of the job, by id."""
        self.folder, self.path = folder, folder / MANIFEST
        self._file = self._folder_lock = None
        try:
            self._lock()
            with writing(folder):
                for left in folder.glob(TEMPORARY + "*"):
                    left.unlink(missing_ok=True)
            with writing(self.path):
                self.path.touch()
            rows = {r["id"]: r for r in read_rows(folder)}
            self.done = {i: r for i, r in rows.items() if self._kept(r, files)}
            self._rewrite(list(self.done.values()))
        except BaseException:
            self.close()
            raise
        self.rows = dict(self.done)

    def _kept(self, row: dict[str, Any], files: dict[str, str]) -> bool:
        """Failed items, and those whose file is missing or altered, are due again."""
        path = inside(self.folder, row)
        if row.get("status") != "ok" or path is None or files.get(row["id"]) != path.name or not path.is_file():
            return False
        if not all(p.is_file() for p in companions(self.folder, row)):
            return False
        return sha256(path) == row.get("sha256")

    def _lock(self) -> None:
        """The lock is on the folder itself: it vanishes with the process and leaves no file behind."""
        try:
            import fcntl
        except ImportError:  # Windows: two writers are then up to the user
            return
        self._folder_lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GenError(
                f"another run is writing into {self.folder}; wait for it or choose another folder"
            ) from error
        except OSError:  # a file system without locks
            return

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Make the manifest hold these rows and nothing else, then open it for appending."""
        text = b"".join(_line(r) for r in rows)
        with writing(self.path):
            if self._file is not None:
                self._file.close()
            if self.path.read_bytes() != text:
                put(self.path, lambda temporary: temporary.write_bytes(text))
            self._file = self.path.open("ab", buffering=0)

    def add(self, row: dict[str, Any]) -> None:
        """Append one row durably; a line that does not fit on the disk is taken back."""
        with writing(self.path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                rest = _line(row)
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                raise
        self.rows[row["id"]] = row

    def finish(self) -> list[dict[str, Any]]:
        """All rows in the order of their ids, in the file as well."""
        rows = [self.rows[i] for i in sorted(self.rows)]
        self._rewrite(rows)
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
