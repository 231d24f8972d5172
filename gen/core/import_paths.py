"""Import paths of objects: ``module:name`` and ``file.py:name``."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from gen.core.errors import GenError
from gen.core.paths import exists


def is_import_path(text: str) -> bool:
    """Return True for ``module:name`` and ``file.py:name``."""
    source, colon, name = text.rpartition(":")
    is_name = all(part.isidentifier() for part in name.split("."))
    return bool(colon and source) and is_name and not exists(text)


def load_object(text: str, where: str) -> Any:
    """Import ``module:name`` or ``file.py:name``; of a class, make an object.

    Args:
        text: import path.
        where: parameter that gave it, for the message.

    Raises:
        GenError: nothing of that name can be imported.
    """
    source, _, name = text.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _module_of_file(Path(source).expanduser())
        else:
            module = import_module(source)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    # a module may raise anything
    except Exception as error:
        raise GenError(
            f"{where} is {text!r}, which cannot be imported: {type(error).__name__}: {error}"
        ) from None
    return found() if inspect.isclass(found) else found


def _module_of_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own."""
    spec = spec_from_file_location(f"gen_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look it up
    spec.loader.exec_module(module)
    return module
