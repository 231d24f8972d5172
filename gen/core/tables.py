"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

EMPTY = "-"  # a cell without a value


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 item``, ``2 items``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells in columns; the first row is the heading."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    )
