"""Medusa heads: every depth of the draft has a head of its own, which reads no draft.

The heads read the last hidden state of the target's forward pass, so that drafting costs one small
layer per depth. The distributions of a tree are those of its depths: the joint distribution of the
drafts is a product.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads"
(arXiv 2401.10774). There drafts are the most probable tokens of a static tree and typical
acceptance decides; here every shape and every verifier serves.

Guarantee: that of the verifier, whatever the heads.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.draft_heads.heads import MedusaHeads
from gen.models.targets.trained_drafters import checked_load, projection, read_drafter
from gen.samplers.causal.drafters.heads import HeadNodes

KIND = "medusa"


@register("drafter", KIND)
class Medusa(HeadNodes):
    """Drafts with a trained head for each depth, which read the target's last hidden state.
    Parameters: ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        net = MedusaHeads(projection(target, KIND), int(facts.net["depth"]))
        return cls(target, checked_load(net, weights, KIND), facts.layers)
