"""Kinds of drafters by name."""

from __future__ import annotations

from gen.recipes.drafters.base import Kind
from gen.recipes.drafters.kind_ar import Autoregressive

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Autoregressive,)}
