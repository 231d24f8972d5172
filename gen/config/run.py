"""Keys of a whole run: layout of the folder and workers. They stand at the top of a file only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gen.config.canonical import plain
from gen.core.errors import GenError, bad_value, unknown

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
MOST_WORKERS = 4096


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
