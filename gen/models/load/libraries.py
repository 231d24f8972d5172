"""Libraries that take seconds to import, each imported when it is first needed.

Resolving a name or listing what there is needs none of them. Their loaders change settings of the
whole process for a moment (initialisers, the default dtype, verbosity), so everything that loads
holds ``LOADING``: of two threads, the second would build its model with the settings of the first.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType
from typing import Any

LOADING = threading.RLock()
# Packages of quantised weights. diffusers imports both of them wherever they are installed, and
# transformers the first, which takes seconds and prints warnings, also where nothing is quantised.
QUANTIZERS = ("torchao", "bitsandbytes")
NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")  # loggers of their imports


def hide_quantizers() -> None:
    """Let transformers and diffusers find no packages of quantised weights in this process.

    The commands of gen do so before anything else: None in ``sys.modules`` is Python's own way to
    say that a package cannot be imported. ``show_quantizers`` takes it back.
    """
    for name in QUANTIZERS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def show_quantizers() -> None:
    """Let packages of quantised weights be imported after ``hide_quantizers``, by transformers too.

    Their loggers stay at errors: what they say is which of their kernels belong to other devices.
    """
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    hidden = [name for name in QUANTIZERS if name in sys.modules and sys.modules[name] is None]
    for name in hidden:
        del sys.modules[name]
    checks: ModuleType | None = sys.modules.get("transformers.utils.import_utils")
    if hidden and checks is not None:  # it remembers what it found
        checks.is_torchao_available.cache_clear()
        checks.is_bitsandbytes_available.cache_clear()


def transformers() -> Any:
    """Import the package ``transformers``."""
    import transformers as library  # heavy, see the module

    return library


def diffusers() -> Any:
    """Import the package ``diffusers``."""
    import diffusers as library  # heavy, see the module

    return library


def accelerate() -> Any:
    """Import the package ``accelerate``."""
    import accelerate as library  # heavy, see the module

    return library


def huggingface_hub() -> Any:
    """Import the package ``huggingface_hub``."""
    import huggingface_hub as library  # heavy, see the module

    return library
