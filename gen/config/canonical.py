"""Plain trees of jobs: one form for equal values, what two trees do not share, and names that tell
entries apart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

ATOMS = frozenset(
    (str, int, bool, type(None))
)  # looked at first: there are many of them where rows are many
BASE = ".base.name"  # of the sampler that another one runs


def sampling_fields() -> list[str]:
    """Names of the sampling parameters."""
    from gen.core.sampling_params import SamplingParams  # imports torch, status needs none

    return list(SamplingParams.__dataclass_fields__)


def plain(value: Any) -> Any:
    """Copy mappings as dicts and sequences as lists."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, (dict, Mapping)):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def canonical(value: Any) -> Any:
    """Convert to plain data in which 2 and 2.0 are one number, as they are to every parameter."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, (dict, Mapping)):
        return {str(k): canonical(v) for k, v in value.items()}
    return [canonical(v) for v in value] if isinstance(value, (list, tuple)) else value


def one_text(value: Any) -> str:
    """Return the same text for every tree that means the same."""
    return json.dumps(canonical(value), sort_keys=True, default=str)


def flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``"""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out


def nested(keys: Sequence[str], value: Any) -> Any:
    """``["a", "b"], 1`` -> ``{"a": {"b": 1}}``"""
    for key in reversed(keys):
        value = {key: value}
    return value


def with_params(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay parameters over those of a spec, such as ``{"name": "best_of", "base": {...}}``.

    A spec with a name replaces the one below, one without adds parameters to it; and so do the
    specs in it, of which a name alone is one too.
    """
    if "name" in over:
        return dict(over)
    merged = {**below, **over}
    for key in over.keys() & below.keys():
        old, new = below[key], over[key]
        old = {"name": old} if isinstance(old, str) else old
        if isinstance(old, Mapping) and isinstance(new, Mapping) and "name" in old:
            merged[key] = with_params(old, new)
    return merged


def merged(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a tree over another, as OmegaConf merges them: mappings key by key, at any depth."""
    out = {**below, **over}
    for key in over.keys() & below.keys():
        if isinstance(below[key], Mapping) and isinstance(over[key], Mapping):
            out[key] = merged(below[key], over[key])
    return out


def factored(trees: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split trees into the keys that all of them share, and the rest of each."""
    first = trees[0]

    def same(a, b):
        return a is b or canonical(a) == canonical(b)

    shared = {k: v for k, v in first.items() if all(k in t and same(t[k], v) for t in trees)}
    return shared, [{k: v for k, v in t.items() if k not in shared} for t in trees]


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List ``seed: was 0, now 7`` for every key in which the relevant trees of two jobs differ
    (see ``Job.relevant``)."""

    def apart(tree):
        return {k: v for k, v in tree.items() if k != "entries"}

    lines = _changed(apart(was), apart(now), "")
    a, b = was.get("entries", []), now.get("entries", [])
    if len(a) != len(b):
        return [*lines, f"jobs: was {len(a)}, now {len(b)}"]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        lines += _changed(x, y, f"jobs.{i}." if len(a) > 1 else "")
    return lines


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    lines = []
    if was.get("prompts") != now.get("prompts"):
        a, b = (_rows(t.get("prompts")) for t in (was, now))
        lines.append(
            f"{prefix}prompts: was {a}, now {b}"
            if a != b
            else f"{prefix}prompts: the rows are not the same"
        )
    x, y = (flat({k: v for k, v in t.items() if k != "prompts"}) for t in (was, now))
    keys = [k for k in {**x, **y} if x.get(k, "unset") != y.get(k, "unset")]
    return lines + [
        f"{prefix}{k}: was {_short(x.get(k, 'unset'))}, now {_short(y.get(k, 'unset'))}"
        for k in keys
    ]


def _rows(prompts: Any) -> str:
    n = prompts.get("rows") if isinstance(prompts, Mapping) else None
    return "unset" if n is None else f"{n} row{'' if n == 1 else 's'}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.strip() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def labels(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name entries: by the sampler, the parameters that tell entries of one sampler apart, and the
    modality if there are several.

    Args:
        entries: the parts of each entry that may stand in a name, with ``sampler``, ``modality``
            and ``model``.
    """
    flats = [flat(e) for e in entries]
    several = len({f["modality"] for f in flats}) > 1
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    bases: dict[tuple, set[tuple]] = defaultdict(set)
    for f in flats:
        groups[_samplers_of(f), f["modality"]].append(f)
        bases[f["sampler.name"], f["modality"]].add(_samplers_of(f))
    telling = {key: _telling(group) for key, group in groups.items()}
    names = []
    for f in flats:
        keys = telling[_samplers_of(f), f["modality"]]
        if len(bases[f["sampler.name"], f["modality"]]) > 1:
            keys = {*(keys if keys != ["model"] else ()), *(k for k in f if k.endswith(BASE))}
        parts = [str(f["model"])] if keys == ["model"] and f["model"] else []
        if keys != ["model"]:
            parts = [f"{_short_key(k)}={f[k]}" for k in f if k in keys]
        names.append(
            " ".join(
                [f["sampler.name"], *parts, *([f"modality={f['modality']}"] if several else [])]
            )
        )
    return names


def _samplers_of(flat_entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the name of an entry's sampler and of each base inside it."""
    names = [v for k, v in flat_entry.items() if k.endswith(BASE)]
    return (flat_entry["sampler.name"], *names)


def _short_key(key: str) -> str:
    """``sampler.base.name`` -> ``base``"""
    short = key.removeprefix("sampler.").removeprefix("sampling.")
    return short.removesuffix(".name") if key.endswith(BASE) else short


def _telling(twins: list[dict[str, Any]]) -> list[str] | set[str]:
    """Return the keys by which entries of one sampler differ; the model alone if it tells them
    all apart."""
    if len(twins) > 1 and len({f.get("model") for f in twins}) == len(twins):
        return ["model"]
    said: dict[str, set[str]] = defaultdict(set)
    for key in dict.fromkeys(k for f in twins for k in f):
        said[key].update(one_text(f.get(key)) for f in twins)
    return {k for k, values in said.items() if len(values) > 1}
