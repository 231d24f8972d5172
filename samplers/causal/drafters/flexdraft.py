"""FlexDraft: a causal model drafts with mask tokens, at which alone its attention was tuned.

For the input x of a projection of attention (queries, keys, values, output) in the last layers,

    W x               at tokens, as before
    W x + U D x       at mask tokens; U [out, r] and D [r, in] are trained, and so is the embedding
                      of the mask

so tokens give the target's own distribution, to the last bit. Masks ride in the pass that verifies
(``gen.samplers.causal.drafters.one_pass``): mask j of a group stands where the j-th token behind
the accepted drafts would, and is about the one after it.

"FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided Calibration" (arXiv
2605.20022). There whole projections are trained, which is r = min(in, out); a small network
corrects the drafts by the token that the pass adds, which their masks do not know; and at large
batches passes that draft and passes that verify take turns. Those two are not here.

Guarantee: that of the verifier, whatever the weights.
Preset: ``flexdraft``, with 7 drafts.
"""

from __future__ import annotations

from gen.core.method import method
from gen.core.registry import register
from gen.models.adapters.mask_attention import MaskAttention, with_masks
from gen.models.targets.mask_tokens import require_plain_history
from gen.models.targets.trained_drafters import checked_load, language_model, read_drafter
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.one_pass import OnePassDrafter

KIND = "flexdraft"


@method(
    "flexdraft",
    sampler="speculative",
    about="drafts with mask tokens, at which alone attention is tuned, in the pass that verifies",
    paper="2605.20022",
    title="FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided"
    " Calibration",
    params={"drafter": KIND, "num_speculative_tokens": 7},
)
@register("drafter", KIND)
class FlexDraft(DraftSource):
    """Drafts with mask tokens, at which alone the target's attention was tuned, in the pass that
    verifies the drafts before. Parameters: ``drafter_weights``, ``num_speculative_tokens``."""

    needs_weights = True
    shapes = False

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        require_plain_history(target, f"the drafter {KIND}")
        model = language_model(target, KIND)
        made = MaskAttention(model, int(facts.net["layers"]), int(facts.net["rank"]))
        network = with_masks(model, checked_load(made, weights, KIND))
        target.run_with(model.with_network(network))
        depth = int(sampler.num_speculative_tokens)
        return OnePassDrafter(model.config.vocab_size, depth, verifier)
