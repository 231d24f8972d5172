"""Parameters of the masked loop itself. Each part declares its own beside its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gen.core.params import choice, flag, integer, part
from gen.core.sampler import PartSampler

# Names in other libraries. LLaDA2Pipeline of diffusers: threshold, editing_threshold,
# num_inference_steps; Fast-dLLM: threshold; LLaDA: remasking, confidence_eos_eot_inf; Dream: alg;
# dInfer: block_size; KLASS: history_length
ALIASES = {
    "threshold": "conf_threshold",
    "editing_threshold": "edit_threshold",
    "num_inference_steps": "steps",
    "remasking": "order",
    "alg": "order",
    "block_size": "block_length",
    "history_length": "history",
    "confidence_eos_eot_inf": "hold_end",
}
# and their words for an order
SPELLINGS = {
    "remasking": {"low_confidence": "confidence", "random": "random"},
    "alg": {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"},
}
# LLaDA's guidance, u + (cfg_scale + 1) (c - u); so in Fast-dLLM, KLASS and others on its code
SAMPLING_ALIASES = {"cfg_scale": ("guidance_scale", 1.0)}


class MaskedSampler(PartSampler):
    """Sampler that runs the masked loop (``gen.samplers.masked.loop``).

    Attributes:
        steps: maximum number of forward passes, if the selector follows the schedule; blocks share
            them in proportion to their length.
        block_steps: forward passes per block; 0 divides ``steps`` among the blocks.
        hold_end: whether a token that ends a text or a turn (``TokenSpace.ends``) counts as
            improbable once it is proposed, so that it is committed last; confidence is that of the
            distribution without such tokens.
        confidence_on: distribution that confidence is read from: ``raw``, the model's own, or
            ``shaped``, with temperature and filters.
        order: part that scores positions; None is confidence for tokens and random for latents.
        schedule: part that sets how many positions are masked after each step.
        proposer: part that proposes a token for each masked position.
        selector: part that selects the positions to commit in this step.
        remasker: part that masks or changes committed positions.
        stop: part that ends rows early.
        blocks: part that sets which positions may be committed.
        cache: part that sets which positions a forward pass computes.
    """

    steps: int = integer(12, least=1, each="step")
    block_steps: int = integer(0)
    hold_end: bool = flag(False)
    confidence_on: str = choice("shaped", ("raw", "shaped"))
    order: str | None = part(None, "order")
    schedule: str = part("cosine", "schedule")
    proposer: str = part("categorical", "proposer")
    selector: str = part("schedule", "selector")
    remasker: str = part("none", "remasker")
    stop: str = part("filled", "stop")
    blocks: str = part("whole", "block_schedule")
    cache: str = part("none", "cache_policy")

    protocol = "masked"
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    spellings: ClassVar[Mapping[str, Mapping[str, Any]]] = SPELLINGS
    sampling_aliases: ClassVar[Mapping[str, tuple[str, float]]] = SAMPLING_ALIASES

    @property
    def constraint_refusal(self) -> str:
        """Nothing: the loop checks tokens that are committed together one after the other."""
        return ""
