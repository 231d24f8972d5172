"""Words of tables: first sentences and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def first_line(obj: Any) -> str:
    """Take the first sentence of a docstring."""
    lines = inspect.cleandoc(obj.__doc__ or "").split("\n\n")[0].split()
    return " ".join(lines).split(". ")[0].removesuffix(".").rstrip() + "." if lines else ""


def default_of(f: dataclasses.Field) -> Any:
    """Return the default of a field, or ``required``."""
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else "required"
