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
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not fits or (high is not None and value > high):
        expected = f"an integer of at least {low}" if high is None else f"{low} to {high}"
        raise bad_value(name, value, expected, where)
    return value


def parse_counts(text: str, name: str) -> list[int]:
    """Parse ``1,8,32`` as integers of at least 1, each once; ``name`` is the flag, for the
    message."""
    try:
        values = [int(x) for x in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise GenError(f"{name} is {text!r}; expected integers of at least 1, separated by commas")
    return list(dict.fromkeys(values))
