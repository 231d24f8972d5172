"""Samplers in a job: every parameter as plain data, those of a base sampler too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gen.contracts.plain_spec import FUNCTION, plain_value
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler, spell
from gen.core.sampler import Sampler


def every_parameter(name: str, sampler: Sampler) -> dict[str, Any]:
    """Return a sampler as ``{"name": ..., parameter: value}`` in plain data with all parameters.

    Args:
        name: its name as written, such as that of a preset.
        sampler: the sampler.
    """
    found: dict[str, Any] = {"name": name}
    for f in fields(sampler) if is_dataclass(sampler) else ():
        value = getattr(sampler, f.name)
        if f.name == "base" and sampler.wraps:
            spec = spell(value)
            found[f.name] = every_parameter(spec["name"], resolve_sampler(spec)[0])
        else:
            found[f.name] = plain_value(value)
    return found


def refuse_functions(spec: Mapping[str, Any], where: str) -> None:
    """Refuse a spec that names a function of an earlier Python call.

    Raises:
        GenError: there is one in it.
    """
    for key, value in spec.items():
        if isinstance(value, Mapping):
            refuse_functions(value, where)
        elif isinstance(value, str) and value.startswith(FUNCTION):
            raise GenError(
                f"sampler.{key} in {where} is the {value!r} of a Python call, which a job cannot"
                " call; expected the name of a scorer (gen ls scorers) or an import path such as"
                " 'rewards.py:brightness'"
            )
