"""Stamps of a metric's parameters, and of the files that they name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gen.core.files import sha256
from gen.core.import_paths import is_import_path
from gen.eval.metric import Metric

EDGE = 2000  # files of a folder that are looked at


def settings_stamp(metric: Metric) -> dict[str, Any]:
    """Return the parameters of a metric, with a stamp of every file or folder that one names.

    Code that a file imports in its turn is not looked at.
    """
    return {key: [value, stamp_of(value)] for key, value in metric.settings.items()}


def stamp_of(value: Any) -> Any:
    """Return a stamp of the file, folder or module that a text names, or None."""
    if not isinstance(value, str) or not value:
        return None
    if is_import_path(value):
        source = value.rpartition(":")[0]
        return stamp_of(source) if source.endswith(".py") else _module_stamp(source)
    path = Path(value).expanduser()
    if path.is_file():
        return sha256(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())[:EDGE]
        return [[str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return None


def _module_stamp(name: str) -> Any:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # the metric says so when it loads the module
        return None
    return stamp_of(spec.origin) if spec and spec.origin else None
