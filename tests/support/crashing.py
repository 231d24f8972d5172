"""What tests of crashes share: a job without a model, processes to kill, system calls that fail,
and what must hold of a folder.

Processes are forks of the test, which has everything imported, so one starts within milliseconds.
Everything is in memory where the system has a place for that: what is killed here are processes,
not disks.
"""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import io
import os
import pickle
import random
import shutil
import signal
import tarfile
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gen.config.job import make_job
from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.stats import Stats, TraceStep
from gen.jobs import plan
from gen.jobs.run import run_job
from gen.store import joblog
from gen.store.ledger import MANIFEST, RUNTIME, SHARDS, WORK, parse_rows, read_rows

DERIVED = (
    "logs",
    "preview",
    "gallery",
    "index.html",
    "config.yaml",
)  # made from the rest, or different from run to run


class Crash:
    """Media of 300 to 4000 bytes, each with a further file."""

    name, extension, also, media_kind, default_sampling, kept = (
        "crash",
        "txt",
        ("csv",),
        "data",
        {},
        "",
    )
    formats = ()
    models, default_samplers, masked_params = {}, {"causal": "speculative_jacobi"}, {}

    def condition(self, prompt):
        return prompt

    def save(self, media, path, info):
        path.write_bytes(media)

    def save_also(self, media, path, info):
        path.write_bytes(hashlib.sha256(media).digest())

    def is_path(self, media):
        return isinstance(media, (str, Path))

    def load(self, path):
        return path.read_bytes()

    def check(self, media, prompt):
        return Verdict(True, True, "")

    def judge(self, media, condition):
        return self.check(media, condition.text or "")

    def media_part(self, condition):
        return ""


def medium(prompt: str, seed: int, more: object = "") -> bytes:
    seen = hashlib.sha256(repr((prompt, seed, more)).encode())
    return seen.hexdigest().encode() * (5 + seen.digest()[0] // 4)


class Pipe:
    """``delay``: seconds per item. ``quota``: items after which it hangs. ``bad``: prompts that
    fail. ``wrong``: media depend on the microbatch. ``made``: what it was asked for, in order."""

    def __init__(
        self, delay: float = 0.0, quota: int = 10**9, bad: tuple[str, ...] = (), wrong: bool = False
    ):
        self.modality, self.delay, self.quota, self.bad, self.wrong, self.made = (
            Crash(),
            delay,
            quota,
            bad,
            wrong,
            [],
        )

    def prompt_lengths(self, items, sampler):
        return [0] * len(items)

    def guarantee(self, sampler):
        return sampler.guarantee

    def turns(self, sampler):
        return 1

    def plan(self, prompts, num_samples, seed):
        items = [(p, seed + j) for p in prompts for j in range(num_samples)]
        return [
            types.SimpleNamespace(
                index=i, prompt=p, seed=s, max_new_tokens=None, given=None, adapter=None
            )
            for i, (p, s) in enumerate(items)
        ]

    def generate(
        self, items, sampler, sampling, *, trace=False, callback=None, start=None, max_batch=None
    ):
        self.quota -= len(items)
        time.sleep(self.delay * len(items) if self.quota >= 0 else 600)
        for item in items:
            if item.prompt in self.bad:
                raise KeyError(item.prompt)
        self.made += [(i.prompt, i.seed) for i in items]
        media = [medium(i.prompt, i.seed, len(items) if self.wrong else "") for i in items]
        stats = [
            Stats(
                nfe=3,
                tokens=4,
                tokens_computed=9,
                positions_computed=9,
                mean_acceptance_length=4 / 3,
                seconds=random.random(),
            )
            for _ in items
        ]
        traces = [[TraceStep([0, 1], [0], {0: 7})] for _ in items] if trace else None
        about = {
            "modality": "crash",
            "model": "toy",
            "model_options": {},
            "served": None,
            "grid": (),
            "logprobs": None,
        }
        return types.SimpleNamespace(media=media, stats=stats, traces=traces, items=items, **about)

    def load(self, modality, **how):
        return self


def register_crash(patch: pytest.MonkeyPatch) -> None:
    """Register the modality, without previews; what is installed does not change, and looking
    takes longer than a run. ``patch.undo()`` takes all of it back."""
    registry.discover()
    patch.setitem(registry._kinds["modality"], "crash", Crash)
    patch.setattr("gen.gallery.write.preview_of", lambda path, folder, row: None)
    for module in (plan, joblog):
        patch.setattr(module, "installed", functools.cache(module.installed))


@pytest.fixture
def ground(tmp_path, monkeypatch):
    """A folder, in memory where there is one; with the modality registered, and no gallery, which
    is made from the rest."""
    register_crash(monkeypatch)
    monkeypatch.setattr("gen.gallery.write.write_gallery", lambda folder: folder / "index.html")
    memory = Path("/dev/shm")
    position = (
        Path(tempfile.mkdtemp(prefix="gen-crash-", dir=memory))
        if os.access(memory, os.W_OK)
        else tmp_path
    )
    try:
        yield position
    finally:
        shutil.rmtree(position, ignore_errors=True)


def job(out: Path, **keys: Any):
    return make_job(
        {
            "modality": "crash",
            "prompts": ["alpha", "beta", "gamma"],
            "sampler": "sjd",
            "out": str(out),
            **keys,
        },
        where="test",
    )


def run(out: Path, pipe: Pipe | None = None, **keys: Any) -> dict[str, Any]:
    return run_job(job(out, **keys), load=(pipe or Pipe()).load)


# --- processes


class Ended(NamedTuple):
    """How a process ended: ``done``, ``refused`` (a GenError), ``broken`` (anything else) or
    ``killed``; what it returned or said."""

    how: str
    said: Any


def fork(body: Callable[[], Any]) -> tuple[int, int]:
    """A process that does ``body``; its number, and where it will say how that ended."""
    read, write = os.pipe()
    say, leave = os.write, os._exit  # as they are before anybody breaks them
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        try:
            said = "done", body()
        except GenError as error:
            said = "refused", str(error)
        except BaseException:
            said = "broken", traceback.format_exc()
        say(write, pickle.dumps(said))
    finally:
        leave(0)


def wait(child: tuple[int, int]) -> Ended:
    """Waits for a process. The pipe first: a process that says much would wait for the reader."""
    pid, read = child
    with open(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return Ended(*pickle.loads(data)) if data else Ended("killed", None)


def apart(body: Callable[[], Any]) -> Ended:
    return wait(fork(body))


# --- what must hold


def audit(folder: Path, but: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a folder at this moment: every row that says ``ok``, wherever it stands,
    has its medium, with its digest, and no row stands twice in the manifest, which is in order.
    ``but``: prompts whose media were damaged on purpose.
    """
    wrong, tars, known = [], {}, {}
    tables = [
        r
        for p in sorted((folder / SHARDS).glob("*.jsonl"))
        if p.name[0] != "."
        for r in parse_rows(p)
    ]
    for where, rows in (
        ("manifest", parse_rows(folder / MANIFEST)),
        ("tables", tables),
        ("lines", read_rows(folder)),
    ):
        ids = [r["id"] for r in rows]
        wrong += [f"{where}: an item twice"] if len(set(ids)) < len(ids) else []
        wrong += (
            [f"{where}: out of order"]
            if [r["index"] for r in rows] != sorted(r["index"] for r in rows)
            else []
        )
        for row in rows:
            if row["status"] != "ok" or row["prompt"] in but:
                continue
            name = row.get("member", row["file"])
            if name not in known:
                known[name] = media_of(folder, row, tars)
            if known[name] is None:
                wrong.append(f"{where}: {row['file']} of item {row['index']} is missing")
            elif hashlib.sha256(known[name]).hexdigest() != row["sha256"]:
                wrong.append(f"{where}: item {row['index']} is not what its row says")
            if (
                "shard_sha256" in row
                and where != "lines"
                and tars.get(row["file"], ("",))[0] != row["shard_sha256"]
            ):
                wrong.append(
                    f"{where}: {row['file']} is not what the row of item {row['index']} says"
                )
    return wrong


def media_of(folder: Path, row: dict[str, Any], tars: dict[str, Any]) -> bytes | None:
    """The medium of a row; what is in ``tars`` is not opened again."""
    path = folder / row["file"]
    if "member" not in row:
        return path.read_bytes() if path.is_file() else None
    if row["file"] not in tars and path.is_file():
        data = path.read_bytes()
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = {m.name: archive.extractfile(m).read() for m in archive}
        except tarfile.TarError:
            members = {}
        tars[row["file"]] = hashlib.sha256(data).hexdigest(), members
    loose = folder / WORK / path.stem / row["member"]
    found = tars.get(row["file"], ("", {}))[1].get(row["member"])
    return loose.read_bytes() if loose.is_file() else found


def contents(folder: Path) -> dict[str, Any]:
    """All of a folder that must not differ from run to run: rows without their times, and the bytes
    of every other file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] in DERIVED or path.is_dir():
            continue
        if not path.is_file():  # a pipe would be read for ever
            found[name] = "no regular file"
            continue
        lines = path.name == MANIFEST or (name.startswith(f"{SHARDS}/") and path.suffix == ".jsonl")
        found[name] = [_lasting(r) for r in parse_rows(path)] if lines else path.read_bytes()
    if (folder / WORK).exists():
        found[WORK] = "still there"
    return found


def _lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in RUNTIME}


def differences(folder: Path, want: dict[str, Any]) -> list[str]:
    """What makes a finished folder another than an undisturbed one."""
    have = contents(folder)
    told = [f"{n} is missing" for n in want if n not in have] + [
        f"{n} should not be there" for n in have if n not in want
    ]
    for name in want:
        if name in have and have[name] != want[name]:
            told.append(
                f"{name} differs"
                + (_first(have[name], want[name]) if isinstance(want[name], list) else "")
            )
    return told + audit(folder)


def _first(have: list[dict], want: list[dict]) -> str:
    if len(have) != len(want):
        return f": {len(have)} rows, not {len(want)}"
    number, a, b = next(
        (i, a, b) for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b
    )
    return (
        f" in row {number}:"
        f" {[(k, a.get(k), b.get(k)) for k in sorted(a | b) if a.get(k) != b.get(k)]}"
    )


def intact(folder: Path) -> dict[str, int]:
    """The attempts of those items that are finished and whole: nothing has to make them again."""
    rows = (
        [r for r in read_rows(folder) if r["status"] == "ok"]
        if (folder / "plan.json").is_file()
        else []
    )
    tars: dict[str, Any] = {}

    def whole(row):
        return hashlib.sha256(media_of(folder, row, tars) or b"").hexdigest() == row["sha256"]

    return {r["id"]: r["attempt"] for r in rows if whole(r)}


def damage(folder: Path) -> None:
    """Spoils the medium of the first item, and in layout shards the tar that holds it."""
    row = read_rows(folder)[0]
    path = folder / row["file"]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] if tarfile.is_tarfile(path) else b"spoilt")


# --- system calls that fail

CALLS = (
    "open",
    "write",
    "fsync",
    "replace",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
)
SPACE = ("write", "mkdir", "link", "create")  # what a full disk refuses


class Faults:
    """Something happens at the ``at``-th call of this process that changes or opens a file, counted
    over all of its threads.

    ``how``: ``kill`` before the call, ``half``: kill where half of the data is written (nothing, if
    the call writes none), or an error number: from then on every call fails for which the system
    would say so; ``EIO`` fails once. After a call is before the next one, so there is no third
    place for a kill.
    """

    def __init__(self, at: int, how: str | int, keep: Callable[[str], Any] = lambda name: None):
        self.at, self.how, self.calls, self.keep, self.lock = at, how, 0, keep, threading.Lock()

    def install(self) -> Faults:
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        plain = io.open

        def opened(
            file,
            mode="r",
            buffering=-1,
            encoding=None,
            errors=None,
            newline=None,
            closefd=True,
            opener=None,
        ):
            if isinstance(file, int) or not set(mode) & set("wax"):
                return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = Raw(self, file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            binary = io.BufferedWriter(raw)
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

        builtins.open = io.open = tarfile.bltn_open = opened
        return self

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            half = (
                (lambda: plain(args[0], args[1][: len(args[1]) // 2]))
                if name == "write"
                else lambda: None
            )
            creates = name == "open" and len(args) > 1 and args[1] & os.O_CREAT
            reads = name == "open" and not args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            self.happen("create" if creates else "read" if reads else name, half)
            return plain(*args, **kwargs)

        return call

    def happen(self, name: str, half: Callable[[], Any]) -> None:
        with self.lock:
            self.calls += 1
            self.keep(name)
            if self.calls < self.at or (self.calls > self.at and not isinstance(self.how, int)):
                return
            if self.how == "half":
                half()
            if not isinstance(self.how, int):
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            if self._refused(name):
                if self.how == errno.ENOSPC:
                    half()
                raise OSError(self.how, os.strerror(self.how))

    def _refused(self, name: str) -> bool:
        if self.how == errno.ENOSPC:
            return name in SPACE
        return (
            name not in ("read", "fsync")
            if self.how in (errno.EROFS, errno.EACCES)
            else self.calls == self.at
        )


class Raw(io.FileIO):
    """A file whose writes are counted."""

    def __init__(self, faults: Faults, file: Any, mode: str):
        self.faults = faults
        faults.happen("create", lambda: None)
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        data = bytes(data)
        self.faults.happen("write", lambda: super(Raw, self).write(data[: len(data) // 2]))
        return super().write(data)
