"""Drafts of the target itself, some of whose layers run at every n-th token alone.

    dropped layers    those whose number l is not a multiple of ``every``
    full tokens       the prompt, and every ``cycle``-th token behind its last one
    full token        y_t = layer(x_t), which attends to the full tokens before it
    token between     y_t = y_a + (alpha / r) B A x_t, a the last full token before t

B begins at 0. A dropped layer makes no keys and values between full tokens, and ``cycle`` 1 is the
target itself.

Rajabzadeh et al., "LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference" (arXiv
2601.02569), whose code has ``every`` 4, ``cycle`` 4, r 8 and alpha 16. There what is left decodes
by itself, and is approximate; here it drafts. What a full token gave is held in the slot of its
position, as keys are, so that a rejected draft is overwritten.

Guarantee: that of the verifier, whatever the maps. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.adapters.draft_models import corrections_of, dropping_model
from gen.models.targets.trained_drafters import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "lora_drop"


@register("drafter", KIND)
class LoraDrop(ModelDrafts):
    """Drafts with the target, some of whose layers run at every n-th token alone and are corrected
    in between. Parameters: ``drafter_weights``, and those of the drafter model without
    ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        folder = sampler.drafter_weights
        return altered_target(folder, KIND, target, corrections_of, dropping_model)
