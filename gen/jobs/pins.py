"""Commits and digests of the models and adapters that a job names.

The plan keeps them. Workers load the commits of the plan, so a branch of the hub that moves while a
job runs changes nothing, and a job that is resumed after that is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gen.config.entries import Entry, Job
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.core.sampler import draft_models
from gen.models.load.hub import HubOptions, NotCached
from gen.models.load.reads import ENDINGS

WEIGHTS, EDGE = (*ENDINGS, ".json"), 1 << 16  # bytes


@dataclass
class NamedModels:
    """Models of a job by label: the name, and behind @ the revision that the job says.

    Attributes:
        weights: digest of the files.
        commits: commit hash of a model of the hub.
        absent: number of files to fetch of a model that is not in the local cache; None where the
            cache does not know it.
    """

    weights: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    absent: dict[str, int | None] = field(default_factory=dict)


def hub_of(entry: Entry, name: str) -> HubOptions:
    """Return the hub options of a model of an entry: its own, a draft model, or an adapter."""
    return HubOptions.among(entry.model_options).of(name, name == entry.model)


def models_of(entry: Entry) -> Iterator[tuple[str, HubOptions, str]]:
    """Yield name, hub options and label of every model and adapter that an entry names."""
    named = {entry.model, *draft_models(entry.sampler.get("draft_model"))}
    named |= {entry.model_options.get("draft_model")}
    adapters = entry.model_options.get("adapters")
    named |= set(adapters.values() if isinstance(adapters, Mapping) else [adapters])
    for name in sorted(n for n in named if n):
        hub = hub_of(entry, name)
        yield name, hub, f"{name}@{hub.revision}" if hub.revision else name


def named_models(job: Job, local: bool = False) -> NamedModels:
    """Find every model that a job names.

    Args:
        job: the job.
        local: look in the local cache alone; no connection is opened.
    """
    found = NamedModels()
    known = {label: (name, hub) for e in job.entries for name, hub, label in models_of(e)}
    for label, (name, hub) in sorted(known.items()):
        try:
            files = CheckpointFiles.find(
                name, replace(hub, local_files_only=True) if local else hub
            )
        except NotCached as error:
            found.absent[label] = error.missing
            continue
        except GenError:  # of a loader of the caller's own; any other one says so when it loads
            continue
        found.weights[label] = _digest_of(files.saved.folder if files.saved else files.path)
        if files.commit is not None:
            found.commits[label] = files.commit
    return found


def pinned_options(entry: Entry, commits: Mapping[str, str]) -> dict[str, Any]:
    """Return the model options of an entry with the commits of a plan as revisions."""
    pins = {name: commits[label] for name, _, label in models_of(entry) if label in commits}
    if not pins:
        return entry.model_options
    revision = HubOptions.among(entry.model_options).pinned(pins, entry.model).revision
    return {**entry.model_options, "revision": revision}


def _digest_of(path: Path) -> str:
    """Digest names, sizes, beginnings and ends of a model's files, since reading all of them takes
    long. Training again into the same folder changes it."""
    digest = hashlib.sha256()
    for file in (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.suffix in WEIGHTS and p.is_file())
    ):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(EDGE))
            content.seek(max(0, size - EDGE))
            digest.update(content.read(EDGE))
    return digest.hexdigest()
