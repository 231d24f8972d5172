"""The structured log of a job: one file of JSON lines per worker, so that nothing interleaves.

A line has ``time`` (wall clock, for people), ``elapsed`` (seconds of a steady clock since the
worker began, for arithmetic), ``worker`` and ``event``, then what the event says. The first line of
every run is ``start`` and says what made the rest. A log that cannot be written is noted once on
stderr and dropped: no job ends because of it. The same events go to the logger ``gen.jobs``.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gen.core.clock import SteadyClock
from gen.core.errors import GenError
from gen.core.files import open_regular, read_regular
from gen.core.versions import gen_version, installed

LOGS = "logs"
LOGGER = logging.getLogger("gen.jobs")
FREQUENT = ("batch",)  # events of which a job has thousands
Event = dict[str, Any]


class JsonLines(logging.Handler):
    """Handler that appends every record to a file, as one JSON line and one write.

    Records carry the ``event`` and its fields, ``about``. Infinities and NaN are written as null,
    and values that JSON does not know as their text. A file that cannot be written is noted once
    on stderr and dropped.
    """

    def __init__(self, path: Path, worker: str):
        super().__init__(logging.DEBUG)
        self.worker, self.path = worker, path
        self._clock, self._file = SteadyClock(), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if self._file.tell() and _last_byte(path) != b"\n":  # a crash in the middle of a line
                self._write(b"\n")
        except OSError as error:
            self._drop(error)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line now."""
        if self._file is None:
            return
        try:
            self._write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        # whatever a caller passes and whatever a disk does: the job goes on
        except Exception as error:
            self._drop(error)

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a record."""
        head = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "elapsed": round(self._clock(), 3),
            "worker": self.worker,
            "event": record.event,
        }
        about = {k: _plain(v) for k, v in record.about.items()}
        return json.dumps({**head, **about}, ensure_ascii=False)

    def close(self) -> None:
        """Close the file; later records are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _write(self, data: bytes) -> None:
        if self._file.write(data) != len(data):
            raise OSError("the disk wrote only a part of a line")

    def _drop(self, error: BaseException) -> None:
        self.close()
        reason = (isinstance(error, OSError) and error.strerror) or error
        try:
            print(
                f"gen: {self.path} cannot be written ({reason}); the job continues without it",
                file=sys.stderr,
                flush=True,
            )
        except (OSError, ValueError, AttributeError):  # no stderr either
            pass


class JobLog:
    """Log of one ``worker``, in ``folder/logs``. Opening it writes ``start`` with ``about`` added,
    such as ``device``.

    Any thread may call `event`. Events also go to the logger ``gen.jobs``: those of single forward
    batches at the level debug, all others at info.
    """

    def __init__(self, folder: str | Path, worker: str, **about: Any):
        self.file = JsonLines(Path(folder) / LOGS / file_name(worker), worker)
        self.event(
            "start",
            gen=gen_version(),
            torch=installed("torch"),
            python=platform.python_version(),
            commit=source_commit(),
            host=socket.gethostname(),
            pid=os.getpid(),
            argv=list(sys.argv),
            **{"device": None, **about},
        )

    def event(self, event: str, **about: Any) -> None:
        """Log an event with its fields."""
        level = logging.DEBUG if event in FREQUENT else logging.INFO
        record = LOGGER.makeRecord(
            LOGGER.name,
            level,
            __file__,
            0,
            "%s",
            (_Line(event, about),),
            None,
            extra={"event": event, "about": about},
        )
        # a job's own file takes every event, whatever levels the user of the logger sets
        self.file.handle(record)
        if LOGGER.isEnabledFor(level):
            LOGGER.handle(record)

    def close(self) -> None:
        """Close the file; later events go to the logger alone."""
        self.file.close()

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Line:
    """An event as one line of text, made only where a handler wants it."""

    event: str
    about: dict[str, Any]

    def __str__(self) -> str:
        fields = (f"{k}={json.dumps(_plain(v))}" for k, v in self.about.items() if v is not None)
        return " ".join([self.event, *fields])


def read_log(folder: str | Path) -> list[Event]:
    """Read the events of all workers in the order of time; those of one worker stay in the order
    in which it wrote them."""
    found: list[tuple[str, Event]] = []
    for path in _files(Path(folder)):
        latest = ""
        for event in _events(_bytes(path)):
            latest = max(
                latest, str(event.get("time", ""))
            )  # a clock set back does not reorder a worker's own lines
            found.append((latest, event))
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def recent(
    folder: str | Path, wanted: Callable[[str, float], bool] = lambda *_: True, most: int = 1 << 17
) -> dict[str, list[Event]]:
    """Per worker, the events of its last run within the last ``most`` bytes of its log.
    ``wanted(worker, written)`` says which logs are worth reading; ``written``: when that was last,
    as ``st_mtime``."""
    found = {}
    for path in _files(Path(folder)):
        try:
            if not wanted(path.stem, path.stat().st_mtime):
                continue
            with open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most))
                data = file.read()
        except (OSError, GenError):
            continue
        events = list(_events(data if size <= most else data.partition(b"\n")[2]))
        starts = [i for i, e in enumerate(events) if e["event"] == "start"]
        events = events[starts[-1] :] if starts else events
        if events:
            found[str(events[-1].get("worker"))] = events
    return found


def file_name(worker: str) -> str:
    """Return the file name of a worker's log."""
    return re.sub(r"[^\w.-]+", "_", worker).lstrip(".") + ".jsonl"


def source_commit(source: Path | None = None) -> str | None:
    """Read the git commit of gen's source from ``.git``, if it runs from a checkout; no program
    is started."""
    root = Path(__file__).resolve().parents[2] if source is None else source
    try:
        git = root / ".git"
        if git.is_file():  # a second work tree: the file says where its part of the repository is
            git = (root / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return _commit(head)
        name = head.removeprefix("ref:").strip()
        common = (
            (git / (git / "commondir").read_text().strip()).resolve()
            if (git / "commondir").is_file()
            else git
        )
        for part in (git, common):
            if (part / name).is_file():
                return _commit((part / name).read_text().strip())
        packed = (line.split(" ") for line in (common / "packed-refs").read_text().splitlines())
        return next((_commit(parts[0]) for parts in packed if parts[1:] == [name]), None)
    except (OSError, ValueError):
        return None


# --- small parts


def _commit(text: str) -> str | None:
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _files(folder: Path) -> list[Path]:
    return sorted((folder / LOGS).glob("*.jsonl"))


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (OSError, GenError):
        return b""


def _events(data: bytes) -> Iterator[Event]:
    """Torn lines, such as a crash leaves, are no events."""
    for text in data.split(b"\n"):
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else str(value)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
