"""Modality of a model, as its own files state it: never by the name of its folder."""

from __future__ import annotations

from pathlib import Path

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles
from gen.contracts.modality import Modality
from gen.core.errors import GenError, bad_value
from gen.core.registry import registry
from gen.models.load.hub import HUB, HubOptions
from gen.models.load.locate import zoo

STATED = "modality"  # key of the config of a model of gen's own architectures


def modality_of(name: str | Path, hub: HubOptions = HUB) -> str:
    """Return the modality that a model makes media of; no weights are loaded.

    A saved pipeline and a model of ``gen train`` state it. A model of the zoo belongs to the
    modality that lists it or its frontend, a published model to the family that knows its files.

    Args:
        name: zoo name, folder, file or hub id of a model.
        hub: as of ``CheckpointFiles.find``.

    Raises:
        GenError: there is no such model, or it serves no modality or several ones.
    """
    files = CheckpointFiles.find(name, hub)
    if files.saved is not None:
        return files.saved.modality
    if files.embedded:
        found = _of_own(str(name), files)
    else:
        table: dict[str, type[Checkpoint]] = registry.table("checkpoint")
        matching = [c for c in table.values() if not c.catch_all and c.matches(files)]
        matching = matching or [c for c in table.values() if c.catch_all and c.matches(files)]
        found = list(dict.fromkeys(m for c in matching for m in c.modalities))
    if len(found) != 1:
        states = " or ".join(found) or "none"
        known = ", ".join(registry.table("modality"))
        raise GenError(
            f"the modality of model {name} is {states} by its config; expected the name of one,"
            f" of {known}"
        )
    return found[0]


def _of_own(name: str, files: CheckpointFiles) -> list[str]:
    """Return the modalities of a model of gen's own architectures."""
    if stated := files.config.get(STATED):
        return [str(stated)]
    frontend = files.config.get("frontend")
    owned = {m: {*c.models.values(), *c.frontends.values()} for m, c in _modalities().items()}
    listed = [m for m, names in owned.items() if name in names and name in zoo()]
    return listed or [m for m, names in owned.items() if frontend in names]


def _modalities() -> dict[str, type[Modality]]:
    return registry.table("modality")


def require_modality(
    modality: Modality, name: str, files: CheckpointFiles, what: str = "model"
) -> None:
    """Raise ``GenError`` for a model of gen's own architectures that makes media of another
    modality. ``what``: argument that names it, for messages."""
    if name in modality.frontends.values():
        raise bad_value(what, name, "a model; it is the frontend of models")
    stated = files.config.get(STATED)
    owners = [m for m, c in _modalities().items() if name in {*c.models.values()}]
    owners += [m for m, c in _modalities().items() if name in {*c.frontends.values()}]
    others = [m for m in ([str(stated)] if stated else owners) if m != modality.name]
    if others:
        raise GenError(
            f"{name} is a model of modality {others[0]!r}; expected one of {modality.name!r}:"
            f" {', '.join(dict.fromkeys(modality.models.values()))}"
        )
