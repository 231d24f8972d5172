"""The engine ``ray``: workers are Ray actors, on this machine or on a cluster, which Ray starts
again where one dies.

The job's folder has to be on storage that every node sees under the same path: the plan, the claims
and the media are there, and nothing of them travels through Ray. An actor pulls shards as any
worker does, so one that dies is started again and pulls on.

``engine_options``: ``address`` of a cluster (or ``RAY_ADDRESS`` in the environment; without either,
Ray starts on this machine for as long as the job runs), and for each actor ``num_cpus`` (1),
``num_gpus`` (1 where the job says ``cuda``, else 0), ``memory`` (bytes), ``resources``,
``accelerator_type``, ``scheduling_strategy`` and ``runtime_env``, which mean what they mean to Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from gen.config.entries import Job
from gen.core.errors import GenError, bad_value
from gen.jobs import worker
from gen.jobs.engines.common import (
    Begun,
    Tally,
    checked,
    ended,
    refuse_launched,
    refuse_load,
    tally,
    wants_cuda,
)
from gen.jobs.progress.report import Silent
from gen.jobs.progress.watch import watch
from gen.jobs.types import Report
from gen.store.ledger import PLAN, is_job

ACTOR = (
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "accelerator_type",
    "scheduling_strategy",
    "runtime_env",
)
OPTIONS = ("address", *ACTOR)
DEATHS = 3  # of one actor, without an item finished by anybody in between
CALLS = 4  # of one actor at the same time
PATIENCE = 30.0  # seconds until a note says that actors wait for resources


class Puller:
    """Class of the actors. ``pull`` and ``end`` are called at the same time."""

    def __init__(self, folder: str, slot: int):
        self.folder, self.slot, self.asked, self.one = (
            Path(folder),
            slot,
            threading.Event(),
            threading.Lock(),
        )

    def where(self) -> tuple[str, int]:
        """Return the host and the process number."""
        return socket.gethostname(), os.getpid()

    def pull(self) -> None:
        """Work on shards until all are done."""
        if not is_job(self.folder):
            raise GenError(
                f"{self.folder / PLAN} is not seen on {socket.gethostname()}; expected a folder on"
                " storage that all nodes share"
            )
        with (
            self.one
        ):  # where the network was away for a moment, this is called again while it runs
            worker.run_worker(self.folder, slot=self.slot, stop=self.asked.is_set)

    def end(self) -> None:
        """Stop after the microbatch."""
        self.asked.set()


def run(
    folder: Path,
    job: Job,
    *,
    progress: Silent,
    load: Callable[..., Any] | None,
    stop: Callable[[], bool],
) -> Report:
    """See `gen.jobs.engines.run_engine`."""
    refuse_launched("ray")
    refuse_load("ray", load)
    options = checked("ray", job.run.engine_options, OPTIONS)
    for key in ("num_cpus", "num_gpus"):
        if not isinstance(options.get(key, 0), (int, float)) or options.get(key, 0) < 0:
            raise bad_value(key, options[key], "a number of at least 0", "engine_options")
    numbered = sorted({e.device for e in job.entries if e.device.startswith("cuda:")})
    if numbered:
        raise GenError(
            f"device is {numbered[0]!r} with engine ray; expected 'cuda': Ray deals the devices,"
            " and an actor sees only its own"
        )
    demand = {
        "num_cpus": 1,
        "num_gpus": int(wants_cuda(job)),
        **{k: v for k, v in options.items() if k in ACTOR},
    }
    workers = job.run.workers
    before = tally(folder)
    with _ray(options.get("address"), workers, demand):
        pool = Pool(folder, workers, demand, progress, stop, before)
        try:
            watch(folder, Begun(progress), pool.over)
        finally:
            pool.end()
    return ended(folder, before, pool.told, f"all {workers} Ray actors", pool.reasons)


class Pool:
    """Actors that pull. Ray starts a dead one again; here it is told to go on, as long as that
    leads anywhere."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        demand: dict[str, Any],
        progress: Silent,
        stop: Callable[[], bool],
        before: Tally,
    ):
        self.folder, self.progress, self.stop, self.told = folder, progress, stop, False
        self.reasons: list[str] = []
        self.best, self.items, self.next = len(before.rows), before.items, 0.0
        self.deaths = [0] * workers
        try:
            kind = ray.remote(Puller).options(max_restarts=-1, max_concurrency=CALLS, **demand)
            self.actors = [kind.remote(str(folder), slot) for slot in range(workers)]
        except (TypeError, ValueError) as error:
            raise GenError(
                f"Ray refuses engine_options: {' '.join(str(error).split())[:300]}"
            ) from error
        self.pulls = {actor.pull.remote(): slot for slot, actor in enumerate(self.actors)}
        self.positions = {actor.where.remote(): slot for slot, actor in enumerate(self.actors)}
        self.late = threading.Event()
        self.timer = threading.Timer(PATIENCE, self.late.set)
        self.timer.daemon = True
        self.timer.start()

    def over(self) -> bool:
        """Return True if no actor has anything left to do."""
        if (
            self.stop() and time.monotonic() >= self.next
        ):  # said again and again: an actor started anew in between has not heard it
            self.told, self.next = True, time.monotonic() + 1
            for slot in set(self.pulls.values()):
                self.actors[slot].end.remote()
        self._note_late_actors()
        ended, _ = (
            ray.wait(list(self.pulls), num_returns=len(self.pulls), timeout=0)
            if self.pulls
            else ([], [])
        )
        for pull in ended:
            self._ended(self.pulls.pop(pull), pull)
        return not self.pulls or (
            self.told and set(self.positions.values()) >= set(self.pulls.values())
        )

    def _ended(self, slot: int, pull: Any) -> None:
        try:
            ray.get(pull)
        except ray.exceptions.RayActorError:
            self._died(slot)
        except (
            ray.exceptions.RayError
        ) as error:  # the worker raised, or cannot be set up: another attempt would do no better
            self.reasons.append(" ".join(str(getattr(error, "cause", None) or error).split())[:500])
            self.progress.note(f"Ray actor {slot} ended: {self.reasons[-1]}")

    def _died(self, slot: int) -> None:
        done = len(tally(self.folder, self.items).rows)
        self.deaths = [0] * len(self.deaths) if done > self.best else self.deaths
        self.best = max(done, self.best)
        self.deaths[slot] += 1
        if self.told:
            return
        if self.deaths[slot] >= DEATHS:
            self.reasons.append(f"one actor died {DEATHS} times while no item was finished")
            self.progress.note(
                f"Ray actor {slot} died {DEATHS} times while no item was finished; it is given up"
            )
            return
        self.progress.note(f"Ray actor {slot} died; Ray starts it again")
        self.pulls[self.actors[slot].pull.remote()] = slot

    def _note_late_actors(self) -> None:
        """Notes what actors wait for, if they wait long."""
        if self.positions:
            here, _ = ray.wait(list(self.positions), num_returns=len(self.positions), timeout=0)
            for reference in here:
                del self.positions[reference]
        if self.positions and self.late.is_set():
            self.late.clear()
            have = {
                k: v
                for k, v in sorted(ray.cluster_resources().items())
                if ":" not in k and "memory" not in k
            }
            self.progress.note(
                f"{len(self.positions)} of {len(self.actors)} Ray actors still wait for resources;"
                f" the cluster has {have}"
            )

    def end(self) -> None:
        """End all actors."""
        self.timer.cancel()
        for actor in self.actors:
            ray.kill(actor)


@contextmanager
def _ray(address: str | None, workers: int, demand: dict[str, Any]) -> Iterator[None]:
    """Ray, connected; what was started or connected here is ended here. Raises ``GenError`` if it
    cannot be reached, or if a Ray of this machine alone has no room for a single actor."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    local = (
        {}
        if address
        else {"num_cpus": max(1, round(workers * demand["num_cpus"])), "include_dashboard": False}
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", **local)
        except Exception as error:  # of many kinds
            what = f"reached at {address}" if address else "started"
            raise GenError(f"Ray cannot be {what}: {' '.join(str(error).split())[:300]}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, before
            )  # Ray's own handler would end this process at once
        have = ray.cluster_resources().get("GPU", 0)
        if local and demand["num_gpus"] > have:
            raise GenError(
                f"a Ray actor needs {demand['num_gpus']} GPU and Ray finds {have:g} on this"
                " machine; expected engine_options.num_gpus of at most that, or the address of a"
                " cluster"
            )
        yield
    finally:
        ray.shutdown()
