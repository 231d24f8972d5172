"""The layers of a job: a file, the entries of its ``jobs:``, overrides; merged strictly, with the place of every value.

Nothing is checked here but names and shape; `gen.config` resolves what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gen.errors import GenError, bad_value, unknown
from gen.start import MEDIA, START

DEFAULTS: dict[str, Any] = {
    "modality": None, "model": None, "model_options": {}, "sampler": {"name": "speculative_jacobi"}, "law": {}, "prompts": None,
    "prompts_file": None, "num_samples": 1, "seed": 0, **dict.fromkeys(START), "device": "cpu",
    "dtype": "float32", "batch_size": 8, "trace": 1,
}  # fmt: skip
FOLDER_KEYS = ("name", "out")  # one folder per run, so these are no keys of an entry
KEYS = (*FOLDER_KEYS, *DEFAULTS, "jobs")
FILES = ("prompts_file", *MEDIA)
NODES = ("sampler", "law", "model_options")  # keys with keys of their own


def read_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.load(path)
        if not isinstance(tree, DictConfig):
            raise GenError(f"{path} holds a list; expected keys such as modality, sampler and prompts")
        return OmegaConf.to_container(tree, resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise GenError(f"{path} is no valid job file: {' '.join(str(error).split())}") from error
    except OSError as error:  # OmegaConf says so for a file that holds one bare value
        raise GenError(f"{path} cannot be read as a job file: {error.strerror or error}") from error


def merge_layers(tree: Mapping, overrides: Sequence[str], where: str, base: Path):
    """Folder keys, and per entry (values, where each value came from, where the entry is)."""
    for key in tree:
        if key not in KEYS:
            raise unknown("key", key, KEYS, where)
    top = {k: tree[k] for k in FOLDER_KEYS if tree.get(k) is not None}
    jobs = tree.get("jobs", [{}])
    if not isinstance(jobs, list) or not jobs:
        raise bad_value("jobs", jobs, "a list of partial jobs", where)
    parsed = []
    for text in overrides:
        keys, value = _override(text, len(jobs) if "jobs" in tree else 0)
        if keys[0] in FOLDER_KEYS:
            if len(keys) > 1:
                raise unknown("key", ".".join(keys), KEYS, f"override {text!r}")
            top[keys[0]] = value
        else:
            parsed.append((keys, value, f"override {text!r}"))
    layers = []
    for i, job in enumerate(jobs):
        place = where if "jobs" not in tree else f"{where}, jobs.{i}"
        if not isinstance(job, Mapping):
            raise bad_value(f"jobs.{i}", job, "keys such as sampler and law", where)
        values, places = dict(DEFAULTS), {}
        _merge(values, {k: v for k, v in tree.items() if k in DEFAULTS}, where, places, base)
        _merge(values, job, place, places, base)
        for keys, value, said in parsed:
            if keys[0] == "jobs":
                if int(keys[1]) != i:
                    continue
                keys = keys[2:]
            _merge(values, {keys[0]: value if len(keys) == 1 else {keys[1]: value}}, said, places, Path())
        layers.append((values, places, place))
    return top, layers


def _override(text: str, jobs: int) -> tuple[list[str], Any]:
    from omegaconf import OmegaConf
    from yaml import YAMLError

    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise GenError(f"override {text!r} has no key or no '='; expected key=value, such as sampler.window=64")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=True)["value"]
    except (YAMLError, ValueError) as error:
        raise GenError(f"override {text!r} has no readable value: {' '.join(str(error).split())}") from error
    inner = keys
    if keys[0] == "jobs":
        if len(keys) < 3 or not keys[1].isdigit() or int(keys[1]) >= jobs:
            expected = f"jobs.N.key with N below {jobs}" if jobs else "a config that has jobs"
            raise GenError(f"override {text!r} reaches no entry; expected {expected}")
        inner = keys[2:]
    elif keys[0] in FOLDER_KEYS:
        return keys, parsed
    if inner[0] not in DEFAULTS or len(inner) > (2 if inner[0] in NODES else 1):
        raise unknown("key", key, (*DEFAULTS, *FOLDER_KEYS), f"override {text!r}")
    return keys, parsed


def _merge(values: dict, layer: Mapping, place: str, places: dict[str, str], base: Path) -> None:
    """Lay one layer over ``values``. A sampler with a name replaces the whole node, one without adds knobs to it; new
    prompts drop the old ones, wherever those came from."""
    for key in layer:
        if key not in DEFAULTS:
            hint = " (a key of the whole run)" if key in FOLDER_KEYS else ""
            raise unknown(f"key{hint}", key, DEFAULTS, place)
    if layer.get("prompts") is not None and layer.get("prompts_file") is not None:
        raise GenError(f"both prompts and prompts_file are given in {place}; expected one of them")
    for key, value in layer.items():
        if key == "sampler":
            value = {"name": value} if isinstance(value, str) else value
            if not isinstance(value, Mapping) or not value:
                raise bad_value("sampler", value, "a name, or {name: ..., knob: value}", place)
            if "name" in value:
                for old in [k for k in places if k.startswith("sampler.")]:
                    del places[old]
            value = dict(value) if "name" in value else {**values["sampler"], **value}
            places.update({f"sampler.{k}": place for k in layer[key]} if isinstance(layer[key], Mapping) else {})
        elif key == "law":
            value = {} if value is None else value
            if not isinstance(value, Mapping):
                raise bad_value("law", value, f"knobs of {', '.join(law_knobs())}", place)
            for knob in value:
                if knob not in law_knobs():
                    raise unknown("knob of the law", knob, law_knobs(), place)
                places[f"law.{knob}"] = place
            value = {**values["law"], **value}
        elif key == "model_options":
            value = {} if value is None else value
            if not isinstance(value, Mapping):
                raise bad_value("model_options", value, "options of the model's family, such as {height: 512}", place)
            value = {**values["model_options"], **value}
        elif key in FILES and value is not None:
            if not isinstance(value, (str, Path)) or not str(value):
                raise bad_value(key, value, "a path", place)
            value = str((base / value).absolute())
            if not Path(value).is_file():
                raise GenError(f"{key} in {place} is no file: {value}")
        if key in ("prompts", "prompts_file"):
            values["prompts"] = values["prompts_file"] = None
        values[key] = value
        places[key] = place


def law_knobs() -> list[str]:
    from gen.law import Law

    return [f.name for f in fields(Law)]
