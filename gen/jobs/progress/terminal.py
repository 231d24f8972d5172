"""Progress on stderr: bars where a terminal can draw them, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys

from gen.core.log import logger
from gen.jobs.progress.bars import Bars
from gen.jobs.progress.report import Lines, Silent

NARROW = 40  # columns; bars need more


def for_terminal() -> Silent:
    """Bars if stderr is a terminal that can draw them, else lines; nothing where the log shows
    errors only."""
    if not logger.isEnabledFor(logging.WARNING):
        return Silent()
    if not is_terminal():
        return Lines()
    bars = Bars()
    return bars if bars.console.width >= NARROW else Lines()


def is_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get(
            "TERM", "dumb" if os.name == "posix" else ""
        ) not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # no stderr, or a closed one
        return False
