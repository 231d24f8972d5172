"""Drafts of a layer that goes on where the target's hidden states end (``entry_nodes``).

    eagle    Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
             Training-Time Test" (arXiv 2503.01840). There drafts are the most probable tokens of a
             tree; here every shape and every way to draw siblings serves

Guarantee: that of the verifier, whatever the weights. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from dataclasses import replace

from gen.core.method import method
from gen.core.registry import register
from gen.core.sampling_params import SamplingParams
from gen.models.nets.draft_heads.eagle import EagleLayer, EagleShape
from gen.models.targets.trained_drafters import language_model, read_drafter
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.entry_nodes import EntryNodes

KIND = "eagle"


def drafted_params(sampling: SamplingParams, temperature: float | None) -> SamplingParams:
    """Return the parameters of drafts that a single branch makes: filters without guidance."""
    plain = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return plain if temperature is None else replace(plain, temperature=temperature)


@method(
    "eagle",
    sampler="speculative",
    about="drafts with a trained layer that reads the target's hidden states",
    paper="2503.01840",
    title="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time"
    " Test",
    params={"drafter": "eagle"},
)
@register("drafter", "eagle")
class Eagle(DraftSource):
    """Drafts with a trained layer that reads the target's hidden states. Parameters:
    ``drafter_weights``, ``num_speculative_tokens``, ``draft_temperature``."""

    params = ("drafter_weights",)
    needs_weights = True

    @classmethod
    def nodes(cls, sampler, target, draft):
        language_model(target, KIND)
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        layer = EagleLayer(EagleShape(**facts.net))
        layer.load_state_dict(weights)
        layer = layer.to(target.device, next(iter(weights.values())).dtype).eval()
        sampling = drafted_params(target.sampling, sampler.draft_temperature)
        return EntryNodes(target, KIND, layer, facts.layers, sampling)
