"""Scale by scale, all positions of a scale in parallel given the scales before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.scales import ScalesLM
from gen.models.targets.scales import ScalesTarget


@register("protocol", "scales")
class Scales(ModelProtocol):
    """Logits of one scale given the sum of all before it; all rows are in the same scale."""

    targets = {"codes": ScalesTarget}
    adapters = {"codes": ScalesLM}
    edits = True
    replaces_rows = False
    closed_form = "Scales"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        # a model of graphs may have scales of something else
        return bool(config.get("scales")) and "vertices_per_word" not in config
