"""Templates of the gallery. Every value is escaped; only drawings, made of numbers, are markup."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@lru_cache
def templates() -> Environment:
    """Return the templates in the folder ``templates``; a missing value is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(name: str, **values: Any) -> str:
    """Render the template ``name.html``."""
    return templates().get_template(f"{name}.html").render(values)
