"""Checks of values that users write."""

from __future__ import annotations

from gen.core.errors import GenError, bad_value


def check_int(name: str, value: object, low: int, high: int | None = None, where: str = "") -> int:
    """Return ``value`` if it is an integer of ``low`` to ``high``; a bool is none.

    Args:
        name: of the parameter, for the message.
        value: what came.
        low: smallest value allowed.
        high: largest value allowed; None for no limit.
        where: the file or flag that set it, for the message.

    Raises:
        GenError: for any other value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not in_range(value, low, high):
        expected = f"an integer of at least {low}" if high is None else f"{low} to {high}"
        raise bad_value(name, value, expected, where)
    return value


def in_range(value: int, low: int, high: int | None) -> bool:
    """Compare a number with its limits; ``high`` None is no limit."""
    return low <= value and (high is None or value <= high)


def parse_counts(text: str, name: str) -> list[int]:
    """Parse ``1,8,32`` as integers of at least 1, each once; ``name`` is the flag, for the
    message."""
    try:
        values = [int(x) if x.isascii() else 0 for x in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise GenError(f"{name} is {text!r}; expected integers of at least 1, separated by commas")
    return list(dict.fromkeys(values))
