"""Scale by scale, with a second pass that refines a partly known scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.core.registry import register
from gen.models.protocols.scales import Scales


@register("protocol", "refined_scales")
class RefinedScales(Scales):
    """Logits of one scale given the sum of all before it, and of its masked positions given its
    other tokens."""

    closed_form = "RefinedScales"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return super().serves(config) and bool(config.get("tail_layers"))
