"""Left to right, against a cache of everything committed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.feature_prompts import causal_lm
from gen.models.adapters.language_models import CausalLatentLM
from gen.models.targets.causal import CausalTarget
from gen.models.targets.latent import CausalLatentTarget


@register("protocol", "causal")
class Causal(ModelProtocol):
    """Logits of the next positions given the tokens before them."""

    targets = {"codes": CausalTarget, "latents": CausalLatentTarget}
    adapters = {"codes": causal_lm, "latents": CausalLatentLM}
    left_to_right = True
    edits = True
    closed_form = "Causal"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return bool(config.get("causal", True)) and "frame" not in config
