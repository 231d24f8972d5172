"""Files that appear whole or not at all: written under a temporary name, fsynced, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BufferedReader
from pathlib import Path

from gen.core.errors import GenError
from gen.core.processes import is_dead, worker_name

TEMPORARY = ".tmp-"
NO_TRANSLATION = getattr(os, "O_BINARY", 0)  # of line ends, on systems that do so


def slug(text: str, length: int = 40) -> str:
    """``A small blue ring!`` -> ``a-small-blue-ring``: what every file system takes, cut at a
    word."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if len(words) > length:
        words = words[: length + 1].rpartition("-")[0] or words[:length]
    return words or "item"


def sha256(path: Path) -> str:
    """Return the digest of a regular file; errors as of ``open_regular``."""
    with reading(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, and nothing else: a pipe waits for ever, a device never ends.

    Raises:
        FileNotFoundError: there is nothing, or no regular file.
        GenError: the file cannot be opened.
    """
    nothing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with reading(path):
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NO_TRANSLATION)
        except OSError as error:
            if error.errno in (
                errno.ENXIO,
                errno.ELOOP,
                errno.ENOTDIR,
            ):  # a socket, a loop of links
                raise nothing from None
            raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise nothing
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Read a regular file; errors as of ``open_regular``."""
    with reading(path), open_regular(path) as file:
        return file.read()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a disk that fails or a forbidden file into one sentence that names the file. A file that
    is not there stays a ``FileNotFoundError``."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise GenError(f"cannot read {path}: {error.strerror or error}") from error


# --- writing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a library that does not like what it is to write
            raise
        raise GenError(f"cannot write {path}: {error.strerror or error}") from error


def put(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` makes the file under a temporary name beside ``path``, with the same extension;
    then it moves there.

    The temporary name says whose it is, so that processes do not touch each other's.
    """
    temporary = temporary_path(path)
    with writing(path):
        try:
            write(temporary)
            sync_file(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{worker_name()}-{threading.get_ident()}-{path.name}")


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


class Puts:
    """Files that are put together: written one by one, then fsynced side by side, since a disk
    takes little longer for many than for one, and only then renamed."""

    def __init__(self, pool: Executor):
        self._pool, self._files = pool, []

    def add(self, path: Path, write: Callable[[Path], object]) -> Path:
        """Write a file under a temporary name, which is returned."""
        temporary = temporary_path(path)
        self._files.append((temporary, path))
        with writing(path):
            write(temporary)
        return temporary

    def __len__(self) -> int:
        return len(self._files)

    def drop(self, first: int = 0) -> None:
        """Forget the files from that one on."""
        while len(self._files) > first:
            with suppress(
                OSError
            ):  # a disk that takes nothing any more; what is left is swept later
                self._files.pop()[0].unlink()

    def commit(
        self, fence: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True)
    ) -> bool:
        """Move every file to its own name, whole, and so that a power cut does not take it back.

        Args:
            fence: makes the context in which the files are moved; they are dropped if it yields
                False.

        Returns:
            True if the files were moved.
        """
        try:
            if self._files:
                with writing(self._files[0][1]):
                    list(self._pool.map(lambda pair: sync_file(pair[0]), self._files))
            with fence() as free:
                if not free:
                    return False
                for temporary, path in self._files:
                    with writing(path):
                        os.replace(temporary, path)
            for folder in {path.parent for _, path in self._files}:
                with writing(folder):
                    sync_folder(folder)
            return True
        finally:
            self.drop()


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


def sweep_temporaries(folder: Path) -> None:
    """Remove temporary files of processes that are gone, and of this one, which writes nothing else
    while it sweeps."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):  # gone meanwhile, or never there
        return
    for name in names:
        worker = "-".join(name.removeprefix(TEMPORARY).split("-")[:3])
        if name.startswith(TEMPORARY) and (worker == worker_name() or is_dead(worker)):
            (folder / name).unlink(missing_ok=True)
