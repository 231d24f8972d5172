"""Lets torchaudio be imported where its compiled extension cannot be loaded.

torchaudio's wheels may be built for another accelerator than the torch beside them; then ``import
torchaudio`` raises, and with it everything of transformers and diffusers that imports it merely
because it is installed. Most of torchaudio is Python and needs no extension, and has a flag for its
absence. ``ensure`` makes a failed load set that flag.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

EXTENSION = "torchaudio._extension"


class _ExtensionFinder(MetaPathFinder):
    """Finds the one module that loads the extension, and guards its execution."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != EXTENSION:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(
                _execute, spec.loader.exec_module
            )  # this spec's own loader object
        return spec


def _execute(plain: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        plain(module)
    except (
        OSError,
        ImportError,
        RuntimeError,
    ) as error:  # not loadable, a part of it missing, built for another CUDA
        logging.getLogger("gen").info("torchaudio runs without its extension: %s", error)
        module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False
        module.fail_if_no_align = partial(_refuse, reason=str(error))


def _refuse(function: Callable, reason: str) -> Callable:
    """What torchaudio puts in the place of a function that needs the extension."""

    @wraps(function)
    def refused(*args, **kwargs):
        raise RuntimeError(
            f"{function.__name__} needs torchaudio's extension, which could not be loaded: {reason}"
        )

    return refused


def ensure() -> None:
    """Call before the first import of transformers or diffusers. Imports nothing; a second call
    does nothing.

    Without torchaudio, or with one that works, nothing changes.
    """
    if not any(isinstance(finder, _ExtensionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ExtensionFinder())
