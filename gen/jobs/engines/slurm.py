"""The engine ``slurm``: an array of SLURM jobs, submitted through submitit, each of which is a
worker that pulls shards.

No task owns a slice of the job, so any number of tasks may start late, time out or never start at
all. A task that runs into its time limit finishes its microbatch if it can and is queued again by
submitit (three times, or ``slurm_max_num_timeout``).

``engine_options``: ``cluster`` (``slurm``; ``local`` runs the same on this machine, for trying
out), ``wait`` (true: stay until all is done, and cancel the tasks where this process is stopped;
false: submit and return), and everything that submitit's executor takes, such as ``timeout_min``,
``cpus_per_task``, ``gpus_per_node``, ``mem_gb``, ``slurm_partition``, ``slurm_array_parallelism``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit import AutoExecutor
from submitit.helpers import DelayedSubmission

from gen.config.entries import Job
from gen.core.errors import GenError, bad_value, unknown
from gen.core.files import writing
from gen.jobs.engines.common import Begun, ended, refuse_launched, refuse_load, tally
from gen.jobs.progress.report import Silent
from gen.jobs.progress.watch import watch
from gen.jobs.rank import own_device, process_rank
from gen.jobs.run import join_job
from gen.jobs.types import Report
from gen.store.ledger import LOGS, PLAN, is_job

CLUSTERS = ("slurm", "local")
COMMON = (
    "name",
    "timeout_min",
    "mem_gb",
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "stderr_to_stdout",
    "slurm_partition",
    "slurm_account",
    "slurm_qos",
    "slurm_constraint",
    "slurm_array_parallelism",
    "slurm_additional_parameters",
    "slurm_setup",
    "slurm_time",
    "slurm_mem",
    "slurm_exclude",
    "slurm_gres",
    "slurm_max_num_timeout",
)  # for hints only
# seconds for a microbatch to end after the signal that a task's time is up, which comes 90 seconds
# before
LAST_WORDS = 60.0
EVERY = 1.0  # seconds between two looks at the tasks


class Pull:
    """Callable of a task; ``checkpoint`` makes it checkpointable for submitit. The worker runs
    in a thread, so that signals are heard while a microbatch is computed."""

    def __init__(self, folder: str, slot: int):
        self.folder, self.slot = folder, slot
        self._asked: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __call__(self) -> dict[str, Any]:
        """Return the report of the worker, or raise its error."""
        folder = Path(self.folder)
        if not is_job(folder):
            raise GenError(
                f"{folder / PLAN} is not seen on this node; expected a folder on storage that all"
                " nodes share"
            )
        self._asked, out = threading.Event(), {}
        device = own_device(
            "cuda", process_rank().local_rank
        )  # with several tasks on a node; only where the job says cuda

        def work() -> None:
            try:
                out["report"] = vars(
                    join_job(
                        folder,
                        slot=self.slot,
                        device=device,
                        stop=self._asked.is_set,
                        trust_job=True,  # who started the job has given their word
                    )
                )
            except BaseException as error:
                out["error"] = error

        for number in (signal.SIGTERM, signal.SIGUSR1):  # submitit uses SIGUSR2
            signal.signal(number, lambda *_: self._asked.set())
        self._thread = threading.Thread(target=work, daemon=True, name="gen-worker")
        self._thread.start()
        while self._thread.is_alive():
            self._thread.join(1.0)
        if "error" in out:
            raise out["error"]
        return out["report"]

    def checkpoint(self) -> Any:
        """Return the same pull to be queued again; submitit calls this when the time is up."""
        if self._asked is not None:
            self._asked.set()
            self._thread.join(LAST_WORDS)
        return DelayedSubmission(Pull(self.folder, self.slot))


def run(
    folder: Path,
    job: Job,
    *,
    progress: Silent,
    load: Callable[..., Any] | None,
    stop: Callable[[], bool],
) -> Report:
    """See `gen.jobs.engines.run_engine`. With ``wait: false`` the report is about nothing, and
    ``stopped`` says that work is left."""
    refuse_launched("slurm")
    refuse_load("slurm", load)
    options = dict(job.run.engine_options)
    wait = options.pop("wait", True)
    if not isinstance(wait, bool):
        raise bad_value("wait", wait, "true or false", "engine_options")
    before = tally(folder)
    tasks = submit(folder, job.run.workers, options)
    numbers = ", ".join(t.job_id for t in tasks)
    progress.note(
        f"submitted {len(tasks)} tasks: {numbers}; their output is in {folder / LOGS / 'slurm'}"
    )
    if not wait:
        progress.note(
            "not waiting for the tasks (wait: false); gen status shows their progress, and the same"
            " command resumes"
        )
        return before.since(before, stopped=True)
    watching = Tasks(tasks, progress, stop)
    try:
        watch(folder, Begun(progress), watching.over)
    except BaseException:
        watching.cancel()
        raise
    return ended(
        folder, before, watching.told, f"all {len(tasks)} tasks ({numbers})", watching.reasons
    )


def submit(folder: Path, workers: int, options: dict[str, Any]) -> list[Any]:
    """Submit the tasks. Raises ``GenError`` for an option that submitit refuses, and without
    such a cluster."""
    cluster = options.pop("cluster", "slurm")
    if cluster not in CLUSTERS:
        raise unknown("cluster", cluster, CLUSTERS, "engine_options")
    ours = {
        k: options.pop(k) for k in list(options) if k.endswith("_max_num_timeout")
    }  # what submitit takes when it is made
    logs = folder / LOGS / "slurm"
    with writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    try:
        executor = AutoExecutor(folder=logs, cluster=cluster, **ours)
        executor.update_parameters(**{"name": "gen", **options})
        with executor.batch():  # one array on a cluster
            return [executor.submit(Pull(str(folder), slot)) for slot in range(workers)]
    except (AssertionError, NameError, TypeError, ValueError) as error:
        wrong = next((k for k in options if k not in COMMON and k in str(error)), None)
        if wrong is not None:
            raise unknown(
                "engine option of slurm", wrong, ["cluster", "wait", *COMMON], "engine_options"
            ) from error
        raise GenError(f"submitit refuses engine_options: {str(error).splitlines()[0]}") from error
    except (RuntimeError, OSError) as error:  # no srun here, sbatch refused
        raise GenError(
            f"tasks cannot be submitted to {cluster}: {' '.join(str(error).split())[:300]}"
        ) from error


class Tasks:
    """Submitted tasks, waited for."""

    def __init__(self, tasks: list[Any], progress: Silent, stop: Callable[[], bool]):
        self.running, self.progress, self.stop, self.told = list(tasks), progress, stop, False
        self.reasons: list[str] = []
        self.next = 0.0

    def over(self) -> bool:
        """Return True if all tasks have ended. Cancels them, once, if this process is asked to
        stop."""
        if not self.told and self.stop():
            self.told = True
            self.cancel()
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + EVERY
            for task in [t for t in self.running if t.done()]:
                self.running.remove(task)
                self._ended(task)
        return not self.running

    def _ended(self, task: Any) -> None:
        if self.told:
            return
        error = task.exception()
        if error is not None:
            lines = [line.strip() for line in str(error).splitlines() if line.strip().strip("-")]
            said = next(
                (
                    line
                    for line in reversed(lines)
                    if ": " in line and not line.startswith("You can check")
                ),
                lines[0],
            )
            self.reasons.append(said.partition("gen.core.errors.GenError: ")[2] or said)
            self.progress.note(
                f"task {task.job_id} ended: {self.reasons[-1]} ({task.paths.stderr})"
            )

    def cancel(self) -> None:
        """Cancel the tasks that still run."""
        for task in self.running:
            task.cancel(check=False)
