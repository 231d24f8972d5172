"""Libraries that take seconds to import, each imported when it is first needed.

Resolving a name or listing what there is needs none of them. Their loaders change settings of the
whole process for a moment (initialisers, the default dtype, verbosity), so everything that loads
holds ``LOADING``: of two threads, the second would build its model with the settings of the first.
"""

from __future__ import annotations

import threading
from typing import Any

LOADING = threading.RLock()


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
