"""Pass a KV cache to a network by the name that its forward has for it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

# names by class, a plain table: a compiled pass reads what the first, eager one wrote
_NAMES: dict[type[nn.Module], str] = {}


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that gives a module, or a layer of one, its KV cache.

    Code that came with a checkpoint may have another name than the library. A wrapper that names
    neither gets ``past_key_values``.
    """
    cls = type(module)
    if cls not in _NAMES:
        named = inspect.signature(cls.forward).parameters
        _NAMES[cls] = "cache" if "cache" in named else "past_key_values"
    return {_NAMES[cls]: cache}
