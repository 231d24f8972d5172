"""Folders of the installed package, and paths that users write."""

from __future__ import annotations

import sys
from pathlib import Path

from gen.core.errors import GenError


def package_folders(name: str) -> list[Path]:
    """Find the folders ``name`` inside the package, one per entry of its search path."""
    return [Path(root) / name for root in sys.modules["gen"].__path__]


def is_file(path: str | Path) -> bool:
    """Return True for a file that is there; a name that no system takes is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long; half a surrogate pair
        return False


def exists(path: str | Path) -> bool:
    """Return True for a file or folder that is there; a name that no system takes is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long; half a surrogate pair
        return False


def expand_user(path: str | Path) -> Path:
    """Replace ``~`` and ``~NAME`` at the beginning of a path by the home folder.

    Raises:
        GenError: the system knows no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise GenError(
            f"path {str(path)!r} begins with ~; expected ~ for your home folder, ~NAME for that of"
            " a user, or ./~ for a file of that name"
        ) from error
