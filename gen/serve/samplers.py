"""Samplers that a request may ask for: none that names files, models elsewhere, or code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gen.core.errors import shown
from gen.core.import_paths import is_import_path
from gen.core.paths import exists
from gen.core.registry import PART_KINDS, SAMPLER_KINDS, registry
from gen.models.load.locate import zoo
from gen.serve.errors import ApiError

# texts of parameters that are empty by default and name neither a model nor a file
WORDS = {"draws"}
DEEPEST = 8  # samplers in each other


def require_served(spec: Any) -> None:
    """Refuse a sampler whose parameters name a file, a folder, a hub id or code.

    A parameter that takes text and is empty by default stands for something to load: a draft
    model, a trained part, a table. It may name a model of the package or a registered part. No
    text may be an import path, and none may hold a slash unless a parameter has it by default.

    Args:
        spec: name of the sampler, or its name and parameters.

    Raises:
        ApiError: the sampler names something else.
    """
    _require(spec, "sampler", 0)


def _require(spec: Any, where: str, depth: int) -> None:
    if depth > DEEPEST:
        raise ApiError(f"{where} nests more than {DEEPEST} objects", "sampler", "invalid_value")
    if isinstance(spec, str):
        _require_word(spec, where, "")
    if not isinstance(spec, Mapping):
        return
    defaults, known = _defaults(spec)
    for key, value in spec.items():
        loads = key != "name" and (defaults.get(key) in (None, "") if known else True)
        for inner in value if isinstance(value, list) else [value]:
            if not isinstance(inner, str):
                _require(inner, f"{where}.{key}", depth + 1)
            elif loads and key not in WORDS and (not known or key in defaults):
                _require_model(inner, f"{where}.{key}")
            else:
                _require_word(inner, f"{where}.{key}", str(defaults.get(key)))


def _require_word(text: str, where: str, default: str) -> None:
    """Refuse a text that could be an import path or a path. Raises ``ApiError``."""
    is_path = "\\" in text or text.startswith((".", "~")) or ("/" in text and "/" not in default)
    if is_path or is_import_path(text) or (text not in _registered() and exists(text)):
        raise _refusal(where, text)


def _require_model(text: str, where: str) -> None:
    """Refuse a text that names, or joins by commas, anything but models of the package and
    registered parts. Raises ``ApiError``."""
    known = zoo().keys() | _registered()
    if any(part.strip() and part.strip() not in known for part in text.split(",")):
        raise _refusal(where, text)


def _registered() -> set[str]:
    """Return the names of all samplers, parts and scorers."""
    return {name for kind in (*SAMPLER_KINDS, "scorer") for name in registry.table(kind)}


def _refusal(where: str, text: str) -> ApiError:
    return ApiError(
        f"{where} is {shown(text)}; expected a registered name or a model of the package, since a"
        " request cannot name files or code",
        where,
        "invalid_value",
    )


def _defaults(spec: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the defaults of the parameters of a sampler, part or scorer under all their names, and
    whether there is such a thing."""
    name = spec.get("name")
    if not isinstance(name, str):
        return {}, False
    preset = registry.table("preset").get(name)
    cls = registry.table("sampler").get(name if preset is None else preset.sampler)
    if cls is None:
        kinds = (*PART_KINDS, "scorer")
        found = (registry.table(kind).get(name) for kind in kinds)
        part = next((x for x in found if x is not None and dataclasses.is_dataclass(x)), None)
        if part is None:
            return {}, False
        return {f.name: f.default for f in dataclasses.fields(part)}, True
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls)}
    aliases = {**cls.aliases, **(preset.aliases if preset else {})}
    words = {alias: "word" for alias in cls.spellings}
    return defaults | {alias: defaults.get(own) for alias, own in aliases.items()} | words, True
