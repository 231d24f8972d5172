"""The engine ``local``: workers on this machine, one in this process or several as its children.

Under ``torchrun``, ``accelerate launch``, ``mpirun`` or ``srun`` the launcher has started the
processes, so each is one worker and starts none. Children write what they have to say into
``logs/worker-N.txt``. One that dies is not started again while others live: they take its shards
over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gen.config.entries import Job
from gen.core.clock import SteadyClock, pause
from gen.core.errors import GenError
from gen.core.files import writing
from gen.core.processes import usable_cores
from gen.jobs import worker
from gen.jobs.engines.common import Begun, ended, refuse_load, tally, wants_cuda
from gen.jobs.progress.report import Silent
from gen.jobs.progress.watch import watch
from gen.jobs.rank import VARIABLES, own_device, process_rank, single_by_accelerate
from gen.jobs.signals import STOPPED
from gen.jobs.types import Report
from gen.store.ledger import LOGS

FINE = (0, 1, STOPPED)  # exit codes of a worker: all done, some items failed, stopped on request
QUICKLY = 3.0  # seconds that a child has after Ctrl-C
SAID = 3  # last lines of a child that died


def run(
    folder: Path,
    job: Job,
    *,
    progress: Silent,
    load: Callable[..., Any] | None,
    stop: Callable[[], bool],
) -> Report:
    """See `gen.jobs.engines.run_engine`."""
    here, workers = process_rank(), job.run.workers
    if here.launched:
        if workers > 1:
            raise GenError(
                f"workers is {workers} in a process that {here.by} started as one of {here.world};"
                " expected workers=1: every process of a launcher is one worker"
            )
        device = own_device("cuda", here.local_rank) if wants_cuda(job) else None
        with _shown(folder, progress) if here.leader else _quiet() as notes:
            return worker.run_worker(
                folder, job=job, slot=here.rank, device=device, load=load, progress=notes, stop=stop
            )
    if workers == 1:
        if single_by_accelerate():
            progress.note(
                "accelerate launch started one process only, as it does without --multi_gpu;"
                " workers=N starts more"
            )
        return worker.run_worker(folder, job=job, load=load, progress=progress, stop=stop)
    refuse_load("local", load)
    before = tally(folder)
    workers = min(workers, max(1, before.items))  # another one would find nothing to do
    crew = Crew(folder, job, workers, progress, stop)
    try:
        watch(folder, Begun(progress), crew.over)
    finally:
        crew.end()
    return ended(folder, before, crew.stopped, f"all {workers} workers", crew.reasons)


class Crew:
    """Child processes, each one a worker. Starting them raises ``GenError`` where their logs cannot
    be written."""

    def __init__(
        self, folder: Path, job: Job, workers: int, progress: Silent, stop: Callable[[], bool]
    ):
        self.progress, self.stop, self.told, self.reasons = progress, stop, False, []
        self.codes: list[int | None] = []
        self.children: list[subprocess.Popen] = []
        self.logs: list[tuple[Path, int]] = []
        environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // workers)))
        try:
            for slot in range(workers):
                device = own_device("cuda", slot) if wants_cuda(job) else None
                self._start(folder, slot, command(folder, slot, device), environ)
        except BaseException:
            self.end()
            raise

    def _start(self, folder: Path, slot: int, line: list[str], environ: dict[str, str]) -> None:
        path = folder / LOGS / f"worker-{slot}.txt"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as log:
                self.logs.append((path, log.seek(0, os.SEEK_END)))
                # a process group of its own: Ctrl-C reaches the parent, which decides what its
                # children do
                child = subprocess.Popen(
                    line,
                    stdin=subprocess.PIPE,  # which tells it when this process ends
                    stdout=log,
                    stderr=log,
                    env=environ,
                    process_group=0,
                )
        self.children.append(child)
        self.codes.append(None)

    @property
    def stopped(self) -> bool:
        """True if workers ended because they were asked to."""
        return self.told or STOPPED in self.codes

    def over(self) -> bool:
        """Return True if all children have ended. Notes those that died, and passes a request to
        stop on, once."""
        if not self.told and self.stop():
            self.told = True
            self._signal(signal.SIGTERM)
        for slot, child in enumerate(self.children):
            if self.codes[slot] is None and (code := child.poll()) is not None:
                self.codes[slot] = code
                if code not in FINE and not (self.told and code in (-signal.SIGTERM, 130)):
                    self._died(slot, code)
        return None not in self.codes

    def _died(self, slot: int, code: int) -> None:
        path, start = self.logs[slot]
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        hint = " (the system does so where memory runs out)" if code == -signal.SIGKILL else ""
        last = tail(path, start)
        self.reasons.append(f"one {how}{hint}" + (f": {last}" if last else ""))
        others = sum(c is None for c in self.codes)
        self.progress.note(
            f"worker {slot} {how}{hint}{'; the others take over its shards' if others else ''}. "
            + (f"Its last lines: {last}" if last else f"Its log is empty ({path})")
        )

    def end(self) -> None:
        """Leave no child behind: those still there have ``QUICKLY`` seconds, which is what Ctrl-C
        means."""
        clock = SteadyClock()
        try:
            self._signal(signal.SIGINT)
            while any(c.poll() is None for c in self.children) and clock() < QUICKLY:
                pause(0.02)
        finally:  # a second Ctrl-C comes here as well
            self._signal(signal.SIGKILL)
            for child in self.children:
                child.wait()
                child.stdin.close()

    def _signal(self, number: int) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


def command(folder: Path, slot: int, device: str | None) -> list[str]:
    """Build the command line of a child."""
    work = ["work", str(folder), "--slot", str(slot), *(["--device", device] if device else [])]
    return [sys.executable, "-m", "gen.cli.child", str(os.getpid()), *work]


def tail(path: Path, start: int = 0) -> str:
    """Read the last lines of a log from byte ``start`` on, as one line."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(deque((line.strip() for line in text.splitlines() if line.strip()), SAID))


class _Notes(Silent):
    """Progress that passes notes on and counts nothing."""

    def __init__(self, progress: Silent):
        self.note = progress.note


@contextmanager
def _shown(folder: Path, progress: Silent) -> Iterator[Silent]:
    """Show the items of all processes while this one is a worker."""
    over = threading.Event()
    thread = threading.Thread(
        target=watch, args=(folder, Begun(progress), over.is_set), daemon=True, name="gen-watch"
    )
    thread.start()
    try:
        yield _Notes(progress)
    finally:
        over.set()
        thread.join(10)


@contextmanager
def _quiet() -> Iterator[Silent]:
    yield Silent()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
