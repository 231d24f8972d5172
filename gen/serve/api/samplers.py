"""Samplers that a request may ask for: none that names files, models elsewhere, or code, and none
that takes more memory or time than a server has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gen.core.errors import shown
from gen.core.import_paths import is_import_path
from gen.core.paths import exists
from gen.core.registry import PART_KINDS, SAMPLER_KINDS, registry
from gen.models.load.locate import zoo
from gen.serve.api.errors import ApiError

# texts of parameters that are empty by default and name neither a model nor a file
WORDS = {"draws"}
DEEPEST = 8  # objects in each other
MOST = 1024  # of a number of drafts, positions, passes ...
MOST_CANDIDATES = 64  # of a number of a search
MOST_SEARCHES = 2  # in each other


def require_served(spec: Any) -> None:
    """Refuse a sampler whose parameters name a file, a folder, a hub id or code.

    A parameter that takes text and is empty by default stands for something to load: a draft
    model, a trained part, a table. It may name a model of the package or a registered part. No
    text may be an import path, and none may hold a slash unless a parameter has it by default.
    An object has a name and at most ``MOST`` values. Whole numbers are at most ``MOST``, those of a
    search at most ``MOST_CANDIDATES``.

    Args:
        spec: name of the sampler, or its name and parameters.

    Raises:
        ApiError: the sampler names something else.
    """
    if isinstance(spec, Mapping) and not isinstance(spec.get("name"), str):
        came = "missing" if "name" not in spec else shown(spec["name"])
        message = f"sampler.name is {came}; expected the name of a sampler"
        raise ApiError(message, "sampler.name", "invalid_value")
    if isinstance(spec, Mapping):
        _require_few(spec)
    _require(spec, "sampler", 0, MOST_SEARCHES)


def _require(spec: Any, where: str, depth: int, searches: int) -> None:
    if depth > DEEPEST:
        raise ApiError(f"{where} nests more than {DEEPEST} objects", "sampler", "invalid_value")
    if isinstance(spec, str):
        _require_word(spec, where, "", is_part=True)
    if not isinstance(spec, Mapping):
        return
    defaults, parts, known = _parameters(spec)
    most = MOST
    if _is_search(spec):
        most, searches = MOST_CANDIDATES, searches - 1
        if searches < 0:
            message = f"{where} is a search of searches of searches; expected at most two"
            raise ApiError(message, where, "invalid_value")
    for key, value in spec.items():
        loads = key != "name" and (defaults.get(key) in (None, "") if known else True)
        for inner in value if isinstance(value, list) else [value]:
            if not isinstance(inner, str):
                _require_number(inner, f"{where}.{key}", most)
                _require(inner, f"{where}.{key}", depth + 1, searches)
            elif loads and key not in WORDS and (not known or key in defaults):
                _require_model(inner, f"{where}.{key}")
            else:
                is_part = key == "name" or key in parts
                _require_word(inner, f"{where}.{key}", str(defaults.get(key)), is_part)


def _require_few(spec: Mapping[str, Any]) -> None:
    """Refuse a sampler of too many values, before they are looked at. Raises ``ApiError``."""
    left: list[Any] = [spec]
    count = 0
    while left:
        value = left.pop()
        inner = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, list | Mapping):
            count += len(value)
            if count > MOST:
                message = f"sampler has more than {MOST} values"
                raise ApiError(message, "sampler", "invalid_value")
            left.extend(inner)


def _is_search(spec: Mapping[str, Any]) -> bool:
    """Return True for a sampler that runs another one."""
    name = spec.get("name")
    preset = registry.table("preset").get(name) if isinstance(name, str) else None
    sampler = preset.sampler if preset else name
    return isinstance(sampler, str) and (
        (cls := registry.table("sampler").get(sampler)) is not None and cls.wraps
    )


def _require_number(value: Any, where: str, most: int) -> None:
    """Refuse a whole number that is too large. Raises ``ApiError``."""
    if isinstance(value, int) and abs(value) > most:
        message = f"{where} is {shown(value)}; expected at most {most} in a request"
        raise ApiError(message, where, "invalid_value")


def _require_word(text: str, where: str, default: str, is_part: bool) -> None:
    """Refuse a text that could be an import path or a path. Raises ``ApiError``.

    Args:
        text: the text.
        where: parameter that holds it.
        default: default of the parameter.
        is_part: the parameter names a registered part, and nothing else.
    """
    is_path = "\\" in text or text.startswith((".", "~")) or ("/" in text and "/" not in default)
    if is_path or is_import_path(text) or (not is_part and exists(text)):
        raise _refusal(where, text)


def _require_model(text: str, where: str) -> None:
    """Refuse a text that names, or joins by commas, anything but models of the package and
    registered parts. Raises ``ApiError``."""
    registered = _registered()
    for name in map(str.strip, text.split(",")):
        if name and name not in zoo() and (name not in registered or exists(name)):
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


def _parameters(spec: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], bool]:
    """Return the parameters of a sampler, part or scorer: the defaults under all their names, those
    that name a registered part, and whether there is such a sampler, part or scorer."""
    name = spec.get("name")
    if not isinstance(name, str):
        return {}, set(), False
    preset = registry.table("preset").get(name)
    cls = registry.table("sampler").get(name if preset is None else preset.sampler)
    if cls is None:
        kinds = (*PART_KINDS, "scorer")
        found = (registry.table(kind).get(name) for kind in kinds)
        part = next((x for x in found if x is not None and dataclasses.is_dataclass(x)), None)
        if part is None:
            return {}, set(), False
        return {f.name: f.default for f in dataclasses.fields(part)}, set(), True
    fields = dataclasses.fields(cls)
    defaults: dict[str, Any] = {f.name: f.default for f in fields}
    parts = {f.name for f in fields if "kind" in f.metadata}
    aliases = {**cls.aliases, **(preset.aliases if preset else {})}
    words = {alias: "word" for alias in cls.spellings}
    named = {alias: defaults.get(own) for alias, own in aliases.items()}
    return defaults | named | words, parts, True
