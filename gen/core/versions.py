"""Which version of a distribution is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
