"""Logging of gen: the logger ``gen`` and those below it, such as ``gen.jobs``.

As a library gen adds no handler and prints nothing by itself. The command line writes to stderr,
from the level that ``--verbose``, ``--quiet`` or ``GEN_LOG_LEVEL`` names.
"""

from __future__ import annotations

import logging
import os
import sys

from gen.core.errors import bad_value

LEVELS = ("debug", "info", "warning", "error")
ENVIRONMENT = "GEN_LOG_LEVEL"
logger = logging.getLogger("gen")


class _Console(logging.StreamHandler):
    """Handler of the command line: lines on the stderr of the moment."""

    def __init__(self, level: int):
        super().__init__()
        self.setLevel(level)
        self.setFormatter(logging.Formatter("gen: %(message)s"))

    @property
    def stream(self):  # tests and notebooks replace sys.stderr
        return sys.stderr

    @stream.setter
    def stream(self, value) -> None:
        pass

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: nobody listens any more, which is no reason to stop working."""


def level_of(name: str, where: str) -> int:
    """Return the level of a name. Raises ``GenError`` for unknown ones; ``where`` names the
    source."""
    if name.lower() not in LEVELS:
        raise bad_value(where, name, f"one of {', '.join(LEVELS)}")
    return getattr(logging, name.upper())


def configure(verbose: bool = False, quiet: bool = False) -> None:
    """Send the log of gen to stderr, from a level on.

    The level is info with ``verbose``, error with ``quiet``, else that of ``GEN_LOG_LEVEL``, which
    is warning by default. A second call replaces the first.

    Raises:
        GenError: ``GEN_LOG_LEVEL`` is no level.
    """
    said = os.environ.get(ENVIRONMENT) or "warning"
    level = level_of("info" if verbose else "error" if quiet else said, ENVIRONMENT)
    for handler in [h for h in logger.handlers if isinstance(h, _Console)]:
        logger.removeHandler(handler)
    logger.addHandler(_Console(level))
    logger.setLevel(level)
    logger.propagate = False  # one line per message, whatever the root logger does
