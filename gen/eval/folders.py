"""Media of a folder by shard: a job folder of either layout, or a plain folder as a reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import sha256
from gen.core.registry import registry
from gen.eval.checkers import no_checker
from gen.store.ledger import RUNTIME, inside, is_job, read_plan, read_rows, require_job
from gen.store.shard_reader import Members

KINDS = {
    "image": ("png", "jpg", "jpeg", "webp", "bmp"),
    "audio": ("wav", "flac", "mp3", "ogg"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "gif"),
    "text": ("txt",),
}
CHUNK = 256  # items of a shard where no plan says


def kind_of_file(name: str) -> str:
    """Return the kind of media of a file by its extension: image, audio, video, text or data."""
    extension = name.rpartition(".")[2].lower()
    return next((kind for kind, known in KINDS.items() if extension in known), "data")


class Broken(Exception):
    """Item without media that can be judged; the message says why."""


class MediaFolder:
    """Rows of a folder in shards. Rows are held in memory, and media one at a time.

    Attributes:
        path: the folder.
        rows: finished items in the order of the plan.
    """

    path: Path
    rows: list[dict[str, Any]]

    def shards(self) -> dict[int, list[dict[str, Any]]]:
        """Return the rows of each shard that has any, by its number."""
        raise NotImplementedError

    @contextmanager
    def media(self, row: dict[str, Any]) -> Iterator[Path]:
        """Yield the media file of a row. Raises ``Broken`` for one that is missing or altered."""
        raise NotImplementedError

    def close(self) -> None:
        """Close open files."""

    def stamp(self, rows: list[dict[str, Any]]) -> str:
        """Return a digest that changes when rows of a shard, or their files, change."""
        said = [{k: v for k, v in row.items() if k not in RUNTIME} for row in rows]
        files = sorted({str(inside(self.path, row)) for row in rows})
        return digest([said, [_file_stamp(Path(file)) for file in files]])


class JobFolder(MediaFolder):
    """Folder that ``gen run``, ``gen sample`` or ``gen decode`` wrote."""

    def __init__(self, path: str | Path):
        self.path = require_job(path)
        self.plan = read_plan(self.path)
        self.rows = read_rows(self.path)
        self._members = Members(self.path)

    def shards(self) -> dict[int, list[dict[str, Any]]]:
        planned = self.plan["shards"] or [
            [first, first + CHUNK] for first in range(0, len(self.plan["items"]), CHUNK)
        ]
        number_of = {
            index: number
            for number, (first, end) in enumerate(planned)
            for index in range(first, end)
        }
        found: dict[int, list[dict[str, Any]]] = {}
        for row in self.rows:
            found.setdefault(number_of.get(row.get("index", 0), 0), []).append(row)
        return dict(sorted(found.items()))

    @contextmanager
    def media(self, row: dict[str, Any]) -> Iterator[Path]:
        if row["status"] != "ok":
            raise Broken(f"the item failed: {row.get('error')}")
        with self._members.path(row) as path:
            if path is None:
                raise Broken(f"file {row.get('member') or row['file']!r} is missing")
            if sha256(path) != row["sha256"]:
                raise Broken(
                    f"file {path.name} is not the one the manifest describes (its sha256 differs)"
                )
            yield path

    def close(self) -> None:
        self._members.close()

    @cached_property
    def _entry_of(self) -> dict[str, int]:
        return {item["id"]: item.get("entry", 0) for item in self.plan["items"]}

    @cached_property
    def _reasons(self) -> dict[str | None, str | None]:
        return {}

    def without_checker(self, row: Any) -> str | None:
        """Return the reason why no checker knows the prompts of an item's model, or None."""
        entries = self.plan["relevant"].get("entries") or []
        entry = self._entry_of.get(row["id"], 0)
        model = entries[entry].get("model") if entry < len(entries) else row.get("model")
        if model not in self._reasons:
            self._reasons[model] = no_checker(model)
        return self._reasons[model]

    def modality(self, name: str) -> Any:
        """Return the modality of that name. Raises ``GenError`` for an unknown one."""
        return registry.get("modality", name, str(self.path))()


class PlainFolder(MediaFolder):
    """Folder of media files without a plan, such as the images of a data set."""

    def __init__(self, path: Path, kinds: tuple[str, ...]):
        self.path = path
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        self.rows = [
            {"id": str(p.relative_to(path)), "file": str(p.relative_to(path)), "prompt": ""}
            for p in files
            if not kinds or kind_of_file(p.name) in kinds
        ]
        if not self.rows:
            raise GenError(f"--reference {path} has no {' or '.join(kinds) or 'media'} file")

    def shards(self) -> dict[int, list[dict[str, Any]]]:
        starts = range(0, len(self.rows), CHUNK)
        return {number: self.rows[first : first + CHUNK] for number, first in enumerate(starts)}

    @contextmanager
    def media(self, row: dict[str, Any]) -> Iterator[Path]:
        yield self.path / row["file"]

    def stamp(self, rows: list[dict[str, Any]]) -> str:
        return digest([_file_stamp(self.path / row["file"]) for row in rows])


def open_reference(path: str | Path, kinds: tuple[str, ...]) -> MediaFolder:
    """Open a job folder or a folder of media. Raises ``GenError`` if it is neither."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise GenError(
            f"--reference {path} does not exist; expected a job folder or a folder of media"
        )
    return JobFolder(path) if is_job(path) else PlainFolder(path, kinds)


def digest(tree: Any) -> str:
    """Return a short digest of plain data."""
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _file_stamp(path: Path) -> list[Any]:
    try:
        about = path.stat()
    except OSError:
        return [path.name, None]
    return [path.name, about.st_size, about.st_mtime_ns]
