"""Texts of users on a terminal."""

from __future__ import annotations

import re

# controls but tab and newline, and marks that turn the direction of what follows
CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: object) -> str:
    """Write control characters of a text as JSON does, so that no prompt moves the cursor, colours
    a terminal or changes its title."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))
