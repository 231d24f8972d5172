"""Versions of installed distributions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
