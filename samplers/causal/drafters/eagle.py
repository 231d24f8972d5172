"""Drafts of a layer that goes on where the target's hidden states end (``heads``).

    eagle    Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
             Training-Time Test" (arXiv 2503.01840). There drafts are the most probable tokens of a
             tree; here every shape and every way to draw siblings serves

Guarantee: that of the verifier, whatever the weights. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from gen.core.method import method
from gen.core.registry import register
from gen.core.sampling_params import SamplingParams
from gen.models.draft_heads.eagle import EagleLayer, EagleShape
from gen.models.targets.trained_drafters import checked_load, language_model, read_drafter
from gen.samplers.causal.drafters.heads import EntryNodes

KIND = "eagle"


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
class Eagle(EntryNodes):
    """Drafts with a trained layer that reads the target's hidden states. Parameters:
    ``drafter_weights``, ``num_speculative_tokens``, ``draft_temperature``."""

    reads = ("drafter_weights",)
    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        language_model(target, KIND)
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        layer = checked_load(EagleLayer(EagleShape(**facts.net)), weights, KIND)
        # a single branch makes the drafts: the target's filters without guidance
        s, temperature = target.sampling, sampler.draft_temperature
        temperature = s.temperature if temperature is None else temperature
        sampling = SamplingParams(temperature, s.top_k, s.top_p, s.min_p)
        return cls(target, KIND, layer, facts.layers, sampling)
