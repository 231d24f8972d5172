"""The structured log of a job: one file of JSON lines per worker, so that nothing interleaves.

A line has ``time`` (wall clock, for people), ``elapsed`` (seconds of a steady clock since the
worker began, for arithmetic), ``worker`` and ``event``, then what the event says. The first line of
every run is ``start`` and says what made the rest. A log that cannot be written is noted once on
stderr and dropped: no job ends because of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gen.core.clock import SteadyClock
from gen.core.versions import installed

LOGS = "logs"
Event = dict[str, Any]


class JobLog:
    """Log of one ``worker``, in ``folder/logs``. Opening it writes ``start`` with ``about`` added,
    such as ``device``.

    Any thread may call `event`: a line is one write to a file that is open for appending.
    """

    def __init__(self, folder: str | Path, worker: str, **about: Any):
        self.worker, self.path = worker, Path(folder) / LOGS / file_name(worker)
        self._clock, self._file = SteadyClock(), None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            if (
                self._file.tell() and _last_byte(self.path) != b"\n"
            ):  # a crash in the middle of a line
                self._write(b"\n")
        except OSError as error:
            self._drop(error)
        self.event(
            "start",
            gen=installed("gen-toolkit"),
            torch=installed("torch"),
            python=platform.python_version(),
            commit=source_commit(),
            host=socket.gethostname(),
            pid=os.getpid(),
            argv=list(sys.argv),
            **{"device": None, **about},
        )

    def event(self, event: str, **about: Any) -> None:
        """Write one line now. Values that JSON does not know are written as their text, and
        infinities and NaN as null."""
        if self._file is None:
            return
        head = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "elapsed": round(self._clock(), 3),
            "worker": self.worker,
            "event": event,
        }
        try:
            text = json.dumps(
                {**head, **{k: _plain(v) for k, v in about.items()}}, ensure_ascii=False
            )
            self._write(text.encode("utf-8", "backslashreplace") + b"\n")
        except (
            Exception
        ) as error:  # whatever a caller passes and whatever a disk does: the job goes on
            self._drop(error)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        if self._file.write(data) != len(data):
            raise OSError("the disk took only a part of a line")

    def _drop(self, error: BaseException) -> None:
        self.close()
        reason = (isinstance(error, OSError) and error.strerror) or error
        try:
            print(
                f"gen: {self.path} cannot be written ({reason}); the job goes on without this log",
                file=sys.stderr,
                flush=True,
            )
        except (OSError, ValueError, AttributeError):  # no stderr either
            pass

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most))
                data = file.read()
        except OSError:
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
        return path.read_bytes()
    except OSError:
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
