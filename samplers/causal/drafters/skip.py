"""Drafts of the target itself with some layers left out, and low-rank maps in their place.

    kept layer      as it is, with keys and values of its own
    skipped layer   x + B A x, a trained map of rank r

B begins at 0, where the drafter is ``layer_skip``. Skipped layers have no attention, and need no
keys and values.

The plan is the same for all tokens and prompts. The drafter ``lora_drop`` runs all layers at every
n-th token, and ``router`` decides for each prompt which layers are left out.

Guarantee: that of the verifier, whatever the maps. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.adapters.draft_models import repaired_model, repairs_of
from gen.models.targets.trained_drafters import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "skip"


@register("drafter", KIND)
class Skip(ModelDrafts):
    """Drafts with some of the target's own layers, and trained low-rank maps in the place of the
    others. Parameters: ``drafter_weights``, and those of the drafter model without
    ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        folder = sampler.drafter_weights
        return altered_target(
            folder, KIND, target, repairs_of, lambda model, net, _: repaired_model(model, net)
        )
