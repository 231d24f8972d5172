"""Drafts of the target's first layers and a trained layer behind them.

The layer stands between the layer that the draft leaves and the target's own last norm and head,
which stay as they are. It has keys and values of its own. Drafts come one at a time, each at the
cost of the first layers and one more.

Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting" (arXiv
2404.18911). There the trained part is an attention with two norms, and the target goes on from the
states of the exit; here it is a layer of the target's kind, and the target computes its own. The
drafter ``early_exit`` has no trained layer.

Guarantee: that of the verifier, whatever the layer.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.adapters.draft_models import exit_layer, exit_model
from gen.models.targets.trained_drafters import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "exit"


@register("drafter", KIND)
class Exit(ModelDrafts):
    """Drafts with the target's first layers and a trained layer behind them. Parameters:
    ``drafter_weights``, and those of the drafter model without ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        return altered_target(
            sampler.drafter_weights,
            KIND,
            target,
            lambda model, net: exit_layer(model, int(net["exit_layer"])),
            lambda model, own, net: exit_model(model, int(net["exit_layer"]), own),
        )
