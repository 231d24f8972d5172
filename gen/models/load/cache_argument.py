"""Pass a KV cache to a network by the name that its forward has for it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

NAMES = "cache", "past_key_values"
# names by class, a plain table: a compiled pass reads what the first, eager one wrote
_NAMES: dict[type[nn.Module], str] = {}


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that gives a module, or a layer of one, its KV cache."""
    cls = type(module)
    if cls not in _NAMES:
        _NAMES[cls] = _cache_name(cls)
    return {_NAMES[cls]: cache}


def cache_in(arguments: dict[str, Any]) -> Any:
    """Take the KV cache out of the keyword arguments that a network passes to its layers."""
    return next(arguments.pop(name) for name in NAMES if name in arguments)


def _cache_name(cls: type[nn.Module]) -> str:
    """Return the name in the forward of a class, or of the first base class that has one.

    Code that came with a checkpoint may have another name than the library.
    """
    for base in cls.__mro__:
        named = inspect.signature(vars(base).get("forward", len)).parameters
        found = next((name for name in NAMES if name in named), None)
        if found is not None:
            return found
    return "past_key_values"
