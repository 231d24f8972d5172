"""``sweep:`` in an entry: a grid over any of its keys. One entry becomes one per combination, the
last key changing fastest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from gen.config.keys import PROMPTS
from gen.core.errors import GenError, bad_value, unknown

MOST = 10_000  # entries of one sweep; more of them are rows of input, not methods to compare


def combinations(
    sweep: Any, keys: Collection[str], nodes: Collection[str], location: str
) -> list[dict[str, Any]]:
    """Expand the grid of a sweep: one ``{dotted key: value}`` per combination, in the order
    written, ``[{}]`` without a sweep.

    Args:
        sweep: the node of the job file.
        keys: keys of an entry.
        nodes: those of them that have keys of their own.
        location: of the sweep, for messages.

    Raises:
        GenError: for an unknown key, a value that is no list or an empty one, and more than
            ``MOST`` combinations.
    """
    if sweep is None or sweep == {}:
        return [{}]
    if not isinstance(sweep, Mapping):
        raise bad_value(
            "sweep", sweep, "keys with a list each, such as {sampler.window: [8, 16]}", location
        )
    lists: dict[str, list[Any]] = {}
    for key, values in sweep.items():
        head, dot, rest = str(key).partition(".")
        if head not in keys or (dot and (head not in nodes or not all(rest.split(".")))):
            raise unknown("key of sweep", key, [*keys, *(f"{n}.<key>" for n in nodes)], location)
        if not isinstance(values, (list, tuple)) or not values:
            raise bad_value(f"sweep.{key}", values, "a list with at least one value", location)
        lists[str(key)] = [
            list(v) if isinstance(v, Iterator) else v for v in values
        ]  # every combination reads it anew
    rows = [key for key in PROMPTS if key in lists]
    if len(rows) > 1:
        raise GenError(f"both {' and '.join(rows)} are swept in {location}; expected one of them")
    count = prod(len(v) for v in lists.values())
    if count > MOST:
        sizes = " x ".join(f"{len(v)} of {k}" for k, v in lists.items())
        raise GenError(
            f"the sweep in {location} makes {count} entries ({sizes}); expected at most {MOST}"
        )
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def refuse_swept(
    keys: list[str], value: Any, said: str, swept: Collection[str], location: str
) -> None:
    """Refuse an override of a swept key, and one that names a sampler whose parameters are
    swept."""
    key = ".".join(keys)
    inner = isinstance(value, Mapping) and "name" not in value
    set_by = {f"{key}.{k}" for k in value} if inner else {key}
    for other in swept:
        if other in set_by or key == other or (not inner and other.startswith(key + ".")):
            raise GenError(
                f"{other} is swept in {location}, and {said} sets {key}; expected one of them"
                f" (sweep.{other}=[...] sets the sweep)"
            )
