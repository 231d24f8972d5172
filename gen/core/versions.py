"""Versions of installed distributions."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # reads the metadata of the distribution
def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def gen_version() -> str:
    """Return the version of gen; ``0+unknown`` for sources that were never installed."""
    return installed("gen-toolkit") or "0+unknown"
