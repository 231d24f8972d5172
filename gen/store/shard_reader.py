"""Files of a job's media in any layout: a member of a tar is extracted for as long as it is needed.

A tar stays open, with its index, until another one is asked for: opening it for every member
takes time quadratic in their number.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gen.store.ledger import WORK, Row, inside


class Members:
    """Media of one job folder; use as a context."""

    def __init__(self, folder: Path):
        self.folder, self._key, self._tar = folder, None, None

    @contextmanager
    def path(self, row: Row, name: str | None = None) -> Iterator[Path | None]:
        """Yield a row's output as a file, or another file of the item (``name``: one of
        ``also``, or ``tokens_file``); None if it is missing."""
        there = inside(self.folder, row)
        if there is None:
            yield None
        elif "member" not in row:
            path = there if name is None else self.folder / Path(name).name
            yield path if path.is_file() and not path.is_symlink() else None
        else:
            member = Path(name or row["member"]).name
            loose = self.folder / WORK / there.stem / member  # of a shard at work
            if loose.is_symlink():
                yield None
                return
            data = None if loose.is_file() else self._read(there, member)
            if data is None:
                yield loose if loose.is_file() else None
                return
            with tempfile.TemporaryDirectory() as out:
                (Path(out) / member).write_bytes(data)
                yield Path(out) / member

    def _read(self, tar: Path, member: str) -> bytes | None:
        if not tar.is_file():  # a pipe waits for ever
            return None
        try:
            said = tar.stat()
            key = (tar, said.st_mtime_ns, said.st_size)
            if key != self._key:
                self.close()
                self._tar, self._key = tarfile.open(tar), key  # noqa: SIM115 - kept open
            file = self._tar.extractfile(member)
            return None if file is None else file.read()
        except (KeyError, OSError, tarfile.TarError):
            return None

    def close(self) -> None:
        """Close the tar."""
        if self._tar is not None:
            self._tar.close()
        self._tar = self._key = None

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
