"""Engines: what starts the workers of a job. Every engine runs the one function
`gen.jobs.worker.run_worker`, as often as ``workers`` says.

Workers pull shards from the ledger in the job's folder and never speak to each other, so an engine
only starts them, watches that they live and waits. Nothing about a job depends on which engine ran
it; ``gen work FOLDER`` on any machine that sees the folder joins in.

An engine is ``run(folder, job, *, progress, load, stop) -> Report``, in a module that is imported
when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gen.config.entries import Job
from gen.core.errors import GenError, unknown
from gen.jobs.progress.report import Silent
from gen.jobs.types import Report

ENGINES = {
    "local": ("local", None, None),
    "ray": ("ray_actors", "ray", "ray"),
    "slurm": ("slurm", "submitit", "slurm"),
}


def engine(name: str, where: str = "") -> Callable[..., Report]:
    """Import the ``run`` of an engine. Raises ``GenError`` for an unknown name, and for an
    engine whose package is not installed."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES, where)
    module, package, extra = ENGINES[name]
    if package is not None and find_spec(package) is None:
        raise GenError(
            f"engine {name} needs the package {package}, which is not installed: pip install"
            f' "gen-toolkit[{extra}]"'
        )
    return import_module(f"gen.jobs.engines.{module}").run


def run_engine(
    name: str,
    folder: Path,
    job: Job,
    *,
    progress: Silent | None = None,
    load: Callable[..., Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Run the planned job of ``folder`` with ``job.run.workers`` workers until nothing is left or
    ``stop()`` is true.

    ``progress`` has been started by the caller, who also closes it. ``load``: a loader of models of
    the caller's own, which only a worker in this process can use. Returns a
    `gen.jobs.worker.Report` about all workers. Raises ``GenError`` where work is left and no worker
    lives to do it; what is done is kept.
    """
    return engine(name)(
        Path(folder).resolve(), job, progress=progress or Silent(), load=load, stop=stop
    )
