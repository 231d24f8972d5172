"""Folders of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path


def package_folders(name: str) -> list[Path]:
    """Find the folders ``name`` inside the package, one per entry of its search path."""
    return [Path(root) / name for root in sys.modules["gen"].__path__]
