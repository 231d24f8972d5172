"""Always the same number of drafts, ``num_speculative_tokens``."""

from __future__ import annotations

from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy


@register("length_policy", "constant")
class Constant(LengthPolicy):
    """Same number of drafts in every step."""
