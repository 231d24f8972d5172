"""Import torchaudio even if its compiled extension cannot be loaded.

torchaudio's wheels may be built for another accelerator than the installed torch. ``import
torchaudio`` then raises, and so does every module of transformers and diffusers that imports it
because it is installed. Most of torchaudio is Python, needs no extension and has a flag for its
absence. ``ensure`` imports torchaudio with that flag set. The packages of gen that import
transformers or diffusers call it first; ``import gen`` does not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

EXTENSION = "torchaudio._extension"


class _ExtensionFinder(MetaPathFinder):
    """Finder of the module that loads the extension; guards its execution."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != EXTENSION:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # the loader object belongs to this spec alone
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)
        return spec


def _execute(plain: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        plain(module)
    # not loadable, incomplete, or built for another CUDA version
    except (OSError, ImportError, RuntimeError) as error:
        logging.getLogger("gen").info("torchaudio runs without its extension: %s", error)
        module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False
        module.fail_if_no_align = partial(_refuse, reason=str(error))


def _refuse(function: Callable, reason: str) -> Callable:
    """Replace a function that needs the extension by one that raises ``RuntimeError``."""

    @wraps(function)
    def refused(*args, **kwargs):
        raise RuntimeError(
            f"{function.__name__} needs torchaudio's extension, which could not be loaded: {reason}"
        )

    return refused


def ensure() -> None:
    """Import torchaudio, if it is installed, before transformers or diffusers import it.

    The import hook is there during this one import only. A second call does nothing, and a working
    torchaudio is not affected.
    """
    if "torchaudio" in sys.modules or find_spec("torchaudio") is None:
        return
    finder = _ExtensionFinder()
    sys.meta_path.insert(0, finder)
    try:
        import_module("torchaudio")
    except Exception as error:  # a foreign package may raise anything; who needs it will say so
        logging.getLogger("gen").warning("torchaudio cannot be imported: %s", error)
    finally:
        sys.meta_path.remove(finder)
