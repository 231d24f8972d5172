"""Libraries that take seconds to import, each imported when it is first needed.

Resolving a name or listing what there is needs none of them.
"""

from __future__ import annotations

from typing import Any


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
