"""Specs of samplers as plain data, which a file can hold: functions under their names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gen.contracts.scorer import FunctionScorer, Scorer, plain_scorer
from gen.core.resolve import spell
from gen.core.sampler import Sampler

FUNCTION = "function "  # before the name of a function that nothing can import


def plain_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec in plain data.

    A function becomes its import path. One that nothing can import, such as a lambda, becomes
    ``function <name>``, which no job accepts again.
    """
    return {str(key): plain_value(value) for key, value in spec.items()}


def plain_value(value: Any) -> Any:
    """Return a parameter in plain data; see ``plain_spec``."""
    if isinstance(value, Sampler):
        return plain_spec(spell(value))
    if isinstance(value, Mapping):
        return plain_spec(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(v) for v in value]
    if isinstance(value, FunctionScorer):
        return value.path or function_name(value.function)
    if isinstance(value, Scorer):
        said = plain_scorer(value)
        return said if isinstance(said, Mapping) else f"{FUNCTION}{said}"
    return function_name(value) if callable(value) else value


def function_name(function: Any) -> str:
    """Return the import path of a function, or ``function <name>`` if nothing can import it."""
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    found: Any = None if module in (None, "__main__") else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else f"{FUNCTION}{name}"
