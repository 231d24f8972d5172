"""Drafts of the target itself, of whose layers a router chooses some for each prompt.

    router of layer l   p_t = sigmoid(w_l x_t + b_l), x_t the layer's input at a prompt's token
    decision            open if the mean of p_t over the prompt without its last token (of a prompt
                        of one token: p_t) is above 1/2
    open                y = layer(x), at the prompt and behind it, with keys and values of its own
    closed              y = x + B A x, a trained map of rank r; r = 0: y = x

Decisions are made layer after layer while the prompt is computed, and hold for all drafts of the
row. With all layers open the draft is the target itself.

Jain et al., "FiRST: Finetuning Router-Selective Transformers for Input-Adaptive Latency Reduction"
(arXiv 2410.12513). There what is left decodes by itself, and LoRA adapters in all layers make up
for those that are skipped; here it drafts, the target's layers stay as they are, and the map of a
closed layer is all that makes up for it.

Guarantee: that of the verifier, whatever the routers. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from gen.core.registry import register
from gen.models.adapters.draft_models import routed_model, routers_of
from gen.models.targets.trained_drafters import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "router"


@register("drafter", KIND)
class Router(ModelDrafts):
    """Drafts with those of the target's own layers that trained routers choose for the prompt.
    Parameters: ``drafter_weights``, and those of the drafter model without ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        folder = sampler.drafter_weights
        return altered_target(
            folder, KIND, target, routers_of, lambda model, net, _: routed_model(model, net)
        )
