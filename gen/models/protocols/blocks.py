"""Block by block, each block like a masked canvas given the blocks before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.language_models import BlockLM
from gen.models.targets.block import BlockTarget


@register("protocol", "blocks")
class Blocks(ModelProtocol):
    """Logits of one block given all blocks before it; all rows are in the same block."""

    targets = {"codes": BlockTarget}
    adapters = {"codes": BlockLM}
    replaces_rows = False
    closed_form = "Blocks"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return not config.get("causal", True) and bool(config.get("block_length"))
