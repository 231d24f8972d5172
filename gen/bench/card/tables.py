"""Tables of results in Markdown, as the documentation has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gen.bench.table import NOTHING, laid_out


def tables(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Format what was measured, and the results: a table for each kind of measurement.

    Its columns are the arguments that differ, what was found, and why nothing was.
    """
    parts = [cell({key: value for key, value in about.items() if value is not None})]
    for kind in dict.fromkeys(result["kind"] for result in results):
        mine = [result for result in results if result["kind"] == kind]
        keys = dict.fromkeys(key for result in mine for key in result["args"])
        given = {key: {cell(result["args"].get(key)) for result in mine} for key in keys}
        varied = [key for key in keys if len(given[key]) > 1]
        heads = dict.fromkeys(key for result in mine for key in result["found"])
        rows = [
            [*(cell(r["args"].get(k)) for k in varied), *(cell(r["found"].get(k)) for k in heads)]
            for r in mine
        ]
        same = [f"{key} {value}" for key in keys if key not in varied for value in given[key]]
        parts += [f"{kind}: {', '.join(same)}", laid_out([[*varied, *heads], *rows], True)]
    return "\n\n".join(parts)


def cell(value: Any) -> str:
    """Format a value: a time is its median with least and most, other mappings are lists."""
    if isinstance(value, Mapping) and "ms" in value:
        return f"{value['ms']:.2f} ms ({value['least']:.2f}–{value['most']:.2f})"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(one)}" for key, one in value.items()) or NOTHING
    return f"{value:.3f}" if isinstance(value, float) else NOTHING if value is None else str(value)
