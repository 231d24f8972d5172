"""Layers of a job: a file, the entries of its ``jobs:``, sweeps, overrides; merged strictly, with
the location of every value.

Only names and shape are checked here; `gen.config.job` resolves the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gen.config.canonical import flat, merged, nested, sampling_fields, with_params
from gen.config.data_sets import check_options
from gen.config.inputs import inline_rows
from gen.config.keys import (
    DEFAULTS,
    FILES,
    FOLDER_KEYS,
    KEYS,
    NODES,
    PROMPTS,
    RUN_NODE,
    depth_of,
)
from gen.config.references import References
from gen.config.run import RUN
from gen.config.sweep import MOST, combinations, refuse_swept
from gen.config.yaml_text import load_yaml
from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.paths import expand_user
from gen.core.plain import is_digits


class Values(NamedTuple):
    """Values of one entry, the origin of each, and the location of the entry."""

    values: dict[str, Any]
    locations: dict[str, str]
    location: str


class Layers(NamedTuple):
    """Keys of the folder and the run, the origin of each, and the entries."""

    top: dict[str, Any]
    locations: dict[str, str]
    entries: list[Values]


def read_yaml(path: Path, allow_env: Collection[str] = ()) -> dict[str, Any]:
    """Read a job file.

    Args:
        path: the file.
        allow_env: names of environment variables that it may refer to.

    Raises:
        GenError: a file that holds no keys, that is beyond the bounds, or with a reference that
            cannot be resolved.
    """
    try:
        tree = load_yaml(path.read_text(encoding="utf-8-sig"))
    except GenError as error:
        raise GenError(f"{path} is not a valid job file: {error}") from error
    except UnicodeDecodeError as error:
        raise GenError(
            f"{path} is not a valid job file: not UTF-8 ({error.reason} at byte {error.start + 1})"
        ) from error
    except OSError as error:
        raise GenError(f"{path} cannot be read as a job file: {error.strerror or error}") from error
    if not isinstance(tree, dict):
        held = "a list" if isinstance(tree, list) else shown(tree)
        raise GenError(f"{path} holds {held}; expected keys such as modality, sampler and prompts")
    return References(tree, allow_env, str(path)).resolved()


def merge_layers(
    tree: Mapping,
    overrides: Sequence[str],
    where: str,
    base: Path,
    allow_env: Collection[str] = (),
) -> Layers:
    """Merge the layers: each entry with its values, one per combination of its sweep.

    Args:
        tree: keys of a job file.
        overrides: ``key=value`` texts.
        where: origin of the tree, for messages.
        base: folder that paths of the tree are relative to.
        allow_env: names of environment variables that an override may refer to.

    Raises:
        GenError: an unknown key, a value of the wrong shape, or too many entries.
    """
    for key in tree:
        if key not in KEYS:
            raise unknown("key", key, KEYS, where)
    jobs = tree.get("jobs", [{}])
    if not isinstance(jobs, list) or not jobs:
        raise bad_value("jobs", jobs, "a list of partial jobs", where)
    if len(jobs) > MOST:
        raise GenError(f"jobs in {where} has {len(jobs):,} entries; expected at most {MOST:,}")
    top, top_origins, parsed = {}, {}, []
    for key in FOLDER_KEYS:
        if key in tree and (tree[key] is not None or key in RUN):
            _set_top(top, top_origins, [key], tree[key], where)
    for text in overrides:
        keys, value = _override(text, len(jobs) if "jobs" in tree else 0, allow_env)
        if keys[0] in FOLDER_KEYS:
            _set_top(top, top_origins, keys, value, f"override {shown(text)}")
        else:
            parsed.append((keys, value, f"override {shown(text)}"))
    shared, shared_origins = dict(DEFAULTS), {}
    _merge(shared, {k: v for k, v in tree.items() if k in DEFAULTS}, where, shared_origins, base)
    entries = []
    for i, job in enumerate(jobs):
        location = where if "jobs" not in tree else f"{where}, jobs.{i}"
        if not isinstance(job, Mapping):
            raise bad_value(f"jobs.{i}", job, "keys such as sampler and sampling", where)
        values, locations = dict(shared), dict(shared_origins)
        _merge(values, {k: v for k, v in job.items() if k != "sweep"}, location, locations, base)
        own = [
            (k[2:] if k[0] == "jobs" else k, v, said)
            for k, v, said in parsed
            if k[0] != "jobs" or int(k[1]) == i
        ]
        sweep = job["sweep"] if "sweep" in job else tree.get("sweep")
        entries += _swept(Values(values, locations, location), sweep, own, base)
        if len(entries) > MOST:
            raise GenError(
                f"the sweeps of {where} make {len(entries):,} entries by jobs.{i} of {len(jobs):,};"
                f" expected at most {MOST:,}"
            )
    return Layers(top, top_origins, entries)


def _swept(
    entry: Values, sweep: Any, overrides: list[tuple[list[str], Any, str]], base: Path
) -> list[Values]:
    """Expand an entry under its sweep and the overrides that reach it."""
    for keys, value, said in overrides:
        if keys[0] == "sweep":
            if len(keys) == 1:
                sweep = value
            elif sweep is None or isinstance(sweep, Mapping):
                sweep = {**(sweep or {}), ".".join(keys[1:]): value}
            entry = entry._replace(location=f"{entry.location} ({said})")
    overrides = [o for o in overrides if o[0][0] != "sweep"]
    out = []
    for combination in combinations(sweep, DEFAULTS, NODES, entry.location):
        if not out:
            for keys, value, said in overrides:
                refuse_swept(keys, value, said, combination, entry.location)
        values, locations = dict(entry.values), dict(entry.locations)
        # a sampler before its parameters, in whatever order they stand
        for key in sorted(combination, key=lambda k: k.count(".")):
            layer = nested(key.split("."), combination[key])
            _merge(values, layer, f"the sweep of {entry.location}", locations, base)
        for keys, value, said in overrides:
            _merge(values, nested(keys, value), said, locations, Path())
        out.append(Values(values, locations, entry.location))
    return out


def _set_top(top: dict, locations: dict, keys: list[str], value: Any, location: str) -> None:
    key = keys[0]
    if len(keys) > (2 if key == RUN_NODE else 1):
        raise unknown("key", ".".join(keys), KEYS, location)
    if key == RUN_NODE:
        value = {keys[1]: value} if len(keys) > 1 else {} if value is None else value
        if not isinstance(value, Mapping):
            raise bad_value(key, value, "options of the engine, such as {partition: gpu}", location)
        value = {**top.get(key, {}), **value}
    top[key], locations[key] = value, location


def _override(text: str, jobs: int, allow_env: Collection[str]) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise GenError(
            f"override {shown(text)} has no key or no '='; expected key=value, such as"
            " sampler.window=64"
        )
    try:
        said = {keys[-1]: load_yaml(value)}
        references = References(said, allow_env, "the override", names_keys=False)
        parsed = references.resolved()[keys[-1]]
    except GenError as error:
        raise GenError(f"override {shown(text)} has no readable value: {error}") from error
    inner = keys
    if keys[0] == "jobs":
        if len(keys) < 3 or not is_digits(keys[1]) or int(keys[1]) >= jobs:
            expected = f"jobs.N.key with N below {jobs}" if jobs else "a config that has jobs"
            raise GenError(f"override {shown(text)} reaches no entry; expected {expected}")
        inner = keys[2:]
    elif keys[0] in FOLDER_KEYS:
        return keys, parsed
    if inner[0] == "sweep":
        return keys, parsed
    if inner[0] not in DEFAULTS:
        hint = " (a key of the whole run)" if inner[0] in FOLDER_KEYS else ""
        raise unknown(
            f"key{hint}", inner[0], (*DEFAULTS, *FOLDER_KEYS, "sweep"), f"override {shown(text)}"
        )
    if len(inner) > (depth := depth_of(inner[0])):
        parent = ".".join(inner[: int(depth)])
        raise GenError(
            f"{parent} has no keys of its own (override {shown(text)}); expected {parent}=value"
        )
    return keys, parsed


def _merge(
    values: dict, layer: Mapping, location: str, locations: dict[str, str], base: Path
) -> None:
    """Lay one layer over ``values``. A sampler with a name replaces the whole node, one without
    adds parameters to it; new prompts drop the old ones, wherever those came from."""
    for key in layer:
        if key not in DEFAULTS:
            hint = " (a key of the whole run)" if key in FOLDER_KEYS else ""
            raise unknown(f"key{hint}", key, DEFAULTS, location)
    said = [key for key in PROMPTS if layer.get(key) is not None]
    if len(said) > 1:
        raise GenError(f"both {' and '.join(said)} are given in {location}; expected one of them")
    for key, value in layer.items():
        if key in NODES:
            value = _merged_node(key, value, values[key], location, locations)
        elif key in FILES and value is not None:
            if not isinstance(value, (str, Path)) or not str(value):
                raise bad_value(key, value, "a path", location)
            value = str((base / expand_user(value)).absolute())
        elif key == "prompts" and value is not None:
            value = inline_rows(value, base, location)
        elif key == "prompts_dataset" and value is not None:
            value = check_options(value, location)
        if key in PROMPTS[1:] and value is None:
            values[key] = None  # leaves prompts that stand beside it alone
            continue
        if key in PROMPTS:
            values.update(dict.fromkeys(PROMPTS))
        values[key] = value
        locations[key] = location


def _merged_node(
    key: str, value: Any, below: Mapping[str, Any], location: str, locations: dict[str, str]
) -> dict[str, Any]:
    """Merge one of ``NODES`` over the layer below and note the location of each key."""
    if key == "sampler":
        tree = {"name": value} if isinstance(value, str) else value
        if not isinstance(tree, Mapping) or not tree:
            raise bad_value("sampler", tree, "a name, or {name: ..., parameter: value}", location)
        if "name" in tree:
            for old in [k for k in locations if k.startswith("sampler.")]:
                del locations[old]
        if isinstance(value, Mapping):
            locations.update(dict.fromkeys(flat(value, "sampler."), location))
        return with_params(below, tree)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        expected = {
            "sampling": f"parameters among {', '.join(sampling_fields())}",
            "model_options": "options of the model's family, such as {height: 512}",
        }[key]
        raise bad_value(key, value, expected, location)
    if key == "sampling":
        for param in value:
            if param not in sampling_fields():
                raise unknown("sampling parameter", param, sampling_fields(), location)
            locations[f"sampling.{param}"] = location
    return merged(below, value)
