"""Words of tables: first sentences and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any


def first_line(obj: Any) -> str:
    """Take the first sentence of a docstring."""
    return first_sentence(inspect.cleandoc(obj.__doc__ or "").split("\n\n")[0])


def first_sentence(text: str) -> str:
    """Take the first sentence of a paragraph, as plain text."""
    words = " ".join(text.replace("`", "").split())
    return re.split(r"(?<=[.])\s", words)[0].removesuffix(".").rstrip() + "." if words else ""


def unquoted(text: str) -> str:
    """Remove the backticks of a docstring, and its full stop."""
    return text.replace("`", "").removesuffix(".")


def default_of(f: dataclasses.Field) -> Any:
    """Return the default of a field, or ``required``."""
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else "required"
