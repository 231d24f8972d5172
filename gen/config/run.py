"""Keys of a whole run: layout of the folder and workers. They stand at the top of a file only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gen.config.canonical import plain
from gen.core.errors import GenError, bad_value, unknown
from gen.core.import_paths import is_import_path

LAYOUTS = ("files", "shards")
ENGINES = ("local", "ray", "slurm")
COUNTED = (
    "layout",
    "tokens",
    "shard_items",
    "deterministic",
)  # what a folder holds depends on these
LASTING = (
    *COUNTED,
    "workers",
    "engine",
    "engine_options",
)  # the others are about one command, so no folder keeps them
# Engine options that only ask for machines. Any other one may run commands (``local_setup`` of
# slurm, ``runtime_env`` of ray) or send the job elsewhere (``address`` of ray).
SLURM = "partition account qos constraint array_parallelism time mem exclude gres max_num_timeout"
MOST_WORKERS = 4096
MAY_RUN_CODE = ("sampler", "model_options", "sweep", "jobs")
REMOTE_CODE = "trust_remote_code"
HARMLESS = (
    *("cluster", "wait", "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task"),
    *("gpus_per_node", "tasks_per_node", "stderr_to_stdout"),
    *(f"slurm_{name}" for name in SLURM.split()),
    *("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "scheduling_strategy"),
)


def refuse_commands(options: Any, where: str) -> None:
    """Refuse engine options of a job file that may run commands: the file may be somebody else's.
    Raises ``GenError`` for the first one."""
    for key, value in options.items() if isinstance(options, Mapping) else ():
        values = value.values() if key == "resources" and isinstance(value, Mapping) else [value]
        one_line = all(
            isinstance(v, int | float) or (isinstance(v, str) and v.isprintable()) for v in values
        )
        if key not in HARMLESS or not one_line:
            raise GenError(
                f"engine_options.{key} in {where} may run commands; expected it on the command line"
                f" (engine_options.{key}=...), or --trust-job for a file that you trust"
            )


def refuse_code(node: Any, where: str, key: str = "") -> None:
    """Refuse what makes a job file run code, which may be somebody else's: an import path in a
    sampler, such as a scorer's, and code in the folder of a model. Sweeps and entries of ``jobs``
    count like the file itself.

    Args:
        node: the tree of the file, or a part of it.
        where: origin of the tree, for messages.
        key: keys that lead to the part.

    Raises:
        GenError: the first such value.
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            if key or name in MAY_RUN_CODE:
                refuse_code(value, where, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            refuse_code(value, where, key)
    else:
        *above, last = key.split(".")
        named = "sampler" in above and isinstance(node, str) and is_import_path(node)
        if named or (last == REMOTE_CODE and node not in (False, None)):
            short = key.removeprefix("jobs.").removeprefix("sweep.")
            raise GenError(
                f"{key} in {where} is {node!r}, which runs code; expected it on the command line"
                f" ({short}=...), or --trust-job for a file that you trust"
            )


@dataclass(frozen=True)
class Run:
    """Settings of a run.

    Attributes:
        layout: a file per output, or tars of shards.
        tokens: keep the tokens beside the outputs.
        shard_items: items that a worker claims at once; None for a number that suits the job.
        deterministic: the same bits for the same microbatches, so that ``batch_size`` counts for
            the fingerprint.
        workers: processes of this command.
        engine: starts the workers, with ``engine_options`` of its own.
        retry: ``failed`` makes failed items again.
        overwrite: drop what the folder holds.
    """

    layout: str = "files"
    tokens: bool = False
    shard_items: int | None = None
    deterministic: bool = False
    workers: int = 1
    engine: str = "local"
    engine_options: dict[str, Any] = field(default_factory=dict)
    retry: str | None = None
    overwrite: bool = False

    def counted(self) -> dict[str, Any]:
        """Collect the keys that count for the fingerprint."""
        return {k: getattr(self, k) for k in COUNTED}

    def said(self) -> dict[str, Any]:
        """Collect the keys that a job file needs for the same run, retries and overwriting
        aside."""
        return {k: getattr(self, k) for k in LASTING if getattr(self, k) != getattr(Run(), k)}


RUN = tuple(f.name for f in fields(Run))


def make_run(values: Mapping[str, Any], locations: Mapping[str, str], where: str) -> Run:
    """Check the keys of a run. Raises ``GenError`` for a wrong value, with its location."""

    def at(key):
        return locations.get(key, where)

    v = dict(values)
    if v.get("retry") == "none":
        v["retry"] = None
    for key, options in (("layout", LAYOUTS), ("engine", ENGINES), ("retry", ("failed", "none"))):
        if key in v and v[key] not in options and not (key == "retry" and v[key] is None):
            raise unknown(key, v[key], options, at(key))
    for key in ("tokens", "deterministic", "overwrite"):
        if key in v and not isinstance(v[key], bool):
            raise bad_value(key, v[key], "true or false", at(key))
    for key in ("workers", "shard_items"):
        free = key == "shard_items" and v.get(key) is None
        if (
            key in v
            and not free
            and (not isinstance(v[key], int) or isinstance(v[key], bool) or v[key] < 1)
        ):
            raise bad_value(key, v[key], "an integer of at least 1", at(key))
    if v.get("workers", 1) > MOST_WORKERS:
        raise bad_value("workers", v["workers"], f"at most {MOST_WORKERS}", at("workers"))
    if "engine_options" in v:
        v["engine_options"] = plain(v["engine_options"])
    run = Run(**v)
    if run.retry and run.overwrite:
        raise GenError(
            f"retry and overwrite are both given in {at('overwrite')}; expected one of them:"
            " overwriting keeps nothing to retry"
        )
    return run
