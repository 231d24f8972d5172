"""Pass a KV cache to a network by the name that its forward has for it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that gives a module, or a layer of one, its KV cache."""
    return {_cache_name(type(module)): cache}


@functools.cache
def _cache_name(cls: type[nn.Module]) -> str:
    """Return the name of the KV cache in the forward of a class. Code that came with a checkpoint
    may have another one than the library."""
    named = inspect.signature(cls.forward).parameters
    return "cache" if "cache" in named else "past_key_values"  # wrappers may name neither
