"""Hydra heads: every depth of the draft has a head, which reads the drafts before it too.

    heads       a head for each depth. Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for
                Medusa Decoding" (arXiv 2402.05109)
    recurrent   one head for all depths, which reads its own last feature. Xiao et al., "Clover:
                Regressive Lightweight Speculative Decoding with Sequential Knowledge" (arXiv
                2405.00263), without its attention
    trigram     a head for each depth, which reads the last three tokens alone. Zeng et al.,
                "Chimera: A Lossless Decoding Method for Accelerating Large Language Models
                Inference by Fusing all Tokens" (arXiv 2402.15758), without its layer

The heads share the target's projection to the vocabulary. They may read hidden states of several
layers.

Guarantee: that of the verifier, whatever the heads.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.head_networks import hydra_of
from gen.samplers.causal.drafters.heads import HeadNodes, checked_load, projection
from gen.samplers.causal.drafters.trained import read_drafter

KIND = "hydra"


@register("drafter", KIND)
class Hydra(DraftSource):
    """Drafts with trained heads, which read the target's hidden states and the drafts before.
    Parameters: ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def nodes(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        net = hydra_of(facts.net, projection(target, KIND))
        return HeadNodes(target, checked_load(net, weights, KIND), facts.layers)
