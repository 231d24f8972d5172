"""Columns of data sets that others made: which one holds the prompt, and what goes to ``meta``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from gen.config.rows import ROW_KEYS, ROW_NODES
from gen.core.errors import GenError, bad_value, unknown

LIKELY = ("prompt", "caption", "text")  # columns that often hold the prompts
MISSPELT = 0.85  # likeness of a column to a key
PLAIN = (str, int, bool, type(None))


def is_known(key: str) -> bool:
    """Return True for a key of a row, such as ``seed`` or ``sampler.window``."""
    head, dot, _ = key.partition(".")
    return head in ROW_KEYS and (not dot or head in ROW_NODES)


def adopt_columns(got: Mapping[str, Any], column: str | None) -> tuple[dict[str, Any], list[str]]:
    """Give a row of a data set the keys of a row.

    Args:
        got: values by column.
        column: the column that holds the prompt; None for ``prompt``.

    Returns:
        The row, with the values of foreign columns under ``meta``, and the foreign columns. Bytes
        are left out; dates and other objects become texts.

    Raises:
        GenError: the column is missing, or a column comes twice in ``meta``.
    """
    row: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for key, value in got.items():
        name = str(key)
        if name == column:
            row["prompt"] = value
        elif (name == "prompt" and column) or not is_known(name) or _is_other_meta(name, value):
            foreign[name] = value
        else:
            row[name] = value
    if column is not None and column not in got:
        raise unknown("column", column, map(str, got), "prompt_column")
    told = {k: _plain(v) for k, v in foreign.items()}
    told = {k: v for k, v in told.items() if v is not None}
    if told:
        own = row.get("meta") or {}
        twice = next((k for k in told if k in own or f"meta.{k}" in row), None)
        if twice is not None:
            raise GenError(f"meta.{twice} is given twice")
        row["meta"] = {**own, **told}
    return row, list(foreign)


def _is_other_meta(name: str, value: Any) -> bool:
    """Return True for a column ``meta`` that holds no keys: a foreign one of that name."""
    return name == "meta" and value is not None and not isinstance(value, Mapping)


def _plain(value: Any) -> Any:
    """Return plain data; None for what says nothing or is no data."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        inner = {str(k): _plain(v) for k, v in value.items()}
        return {k: v for k, v in inner.items() if v is not None} or None
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def note_of(columns: list[str], source: str) -> str:
    """Format the note about foreign columns, with a hint where one looks like a key."""
    hints = []
    for column in columns:
        near = difflib.get_close_matches(column, ROW_KEYS, 1, MISSPELT)
        is_typo = bool(near) and near[0] != column
        hints.append(f"{column} (a misspelt {near[0]}?)" if is_typo else column)
    shown = ", ".join(hints[:10]) + (f" and {len(hints) - 10} more" if len(hints) > 10 else "")
    plural = "columns" if len(columns) > 1 else "column"
    return f"{plural} {shown} of {source} {'go' if len(columns) > 1 else 'goes'} to meta"


def missing_prompt(columns: list[str]) -> str:
    """Format the message about a table without the column ``prompt``."""
    near = next((c for c in columns if c.lower().rstrip("s") in LIKELY), None)
    return (
        f"there is no column 'prompt'; expected one, or prompt_column={near or 'NAME'} (columns:"
        f" {', '.join(columns[:20])})"
    )


def check_column(column: Any, where: str) -> str | None:
    """Check the value of ``prompt_column``."""
    if column is not None and (not isinstance(column, str) or not column.strip()):
        raise bad_value("prompt_column", column, "the name of a column", where)
    return column
