"""Hydra heads: every depth of the draft has a head, which reads the drafts before it too.

    heads       a head for each depth. Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for
                Medusa Decoding" (arXiv 2402.05109)
    recurrent   one head for all depths, which reads its own last feature. Xiao et al., "Clover:
                Regressive Lightweight Speculative Decoding with Sequential Knowledge" (arXiv
                2405.00263), without its attention
    trigram     a head for each depth, which reads the last three tokens alone. Zeng et al.,
                "Chimera: A Lossless Decoding Method for Accelerating Large Language Models
                Inference by Fusing all Tokens" (arXiv 2402.15758), without its layer
    clover      Clover whole: a layer over the target's states, and attention to it and to the
                features of the depths before
    chimera     Chimera whole: a layer over the encodings of all tokens, and residual heads

The heads share the target's projection to the vocabulary. They may read hidden states of several
layers. ``clover`` and ``chimera`` keep keys and values of their own (``heads``), and each
depth counts as a pass of the drafter, as one of EAGLE's layer does.

Guarantee: that of the verifier, whatever the heads.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.draft_heads.entries import EntryLayer
from gen.models.draft_heads.heads import hydra_of
from gen.models.targets.trained_drafters import checked_load, projection, read_drafter
from gen.samplers.causal.drafters.heads import EntryNodes, HeadNodes

KIND = "hydra"


@register("drafter", KIND)
class Hydra(HeadNodes):
    """Drafts with trained heads, which read the target's hidden states and the drafts before.
    Parameters: ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        net = checked_load(hydra_of(facts.net, projection(target, KIND)), weights, KIND)
        if isinstance(net, EntryLayer):
            return EntryNodes(target, KIND, net, facts.layers)
        return cls(target, net, facts.layers)
