"""Any order, on a canvas with masked positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.feature_prompts import masked_lm
from gen.models.adapters.language_models import MaskedLatentLM
from gen.models.targets.latent import MaskedLatentTarget
from gen.models.targets.masked import MaskedTarget


@register("protocol", "masked")
class Masked(ModelProtocol):
    """Logits of all positions of a canvas given those that are not masked."""

    targets = {"codes": MaskedTarget, "latents": MaskedLatentTarget}
    adapters = {"codes": masked_lm, "latents": MaskedLatentLM}
    edits = True
    draws_lengths = True
    closed_form = "Masked"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        if config.get("causal", True) or config.get("scales") or "vertices_per_word" in config:
            return False
        return not config.get("block_length") or bool(config.get("whole"))
