"""Drafts of the target's own network, with some of its layers left out or trained parts in their
place.

    layer_skip   any plan of layers, ``kept_layers``: a share of them, spread evenly from the first
                 to the last, or their numbers. Liu et al., "Accelerating Inference in Large
                 Language Models with a Unified Layer Skipping Strategy" (arXiv 2404.06954), whose
                 plan is the same for every input. There the skipping model decodes by itself
    early_exit   the first ``exit_layer`` layers and the head. Liu et al., "Kangaroo" (arXiv
                 2404.18911), without the adapter that it trains between the two
    exit         the first layers, and a trained layer between them and the target's own last norm
                 and head, with keys and values of its own. "Kangaroo" again: there the trained part
                 is an attention with two norms, and the target goes on from the states of the exit;
                 here it is a layer of the target's kind, and the target computes its own
    skip         some layers as they are. In the place of the others x + B A x, a trained map of
                 rank r without attention, keys and values. B begins at 0, where it is layer_skip
    lora_drop    layers whose number is not a multiple of ``every`` run at full tokens alone: the
                 prompt, and every ``cycle``-th token behind its last one. Between them they make no
                 keys and values:

                     full token       y_t = layer(x_t), which attends to the full tokens before it
                     token between    y_t = y_a + (alpha / r) B A x_t, a the last full token before

                 B begins at 0; ``cycle`` 1 is the target itself. What a full token gave is held in
                 the slot of its position, as keys are, so that a rejected draft is overwritten.
                 Rajabzadeh et al., "LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference"
                 (arXiv 2601.02569), whose code has ``every`` 4, ``cycle`` 4, r 8 and alpha 16.
                 There what is left decodes by itself, and is approximate
    router       the layers that routers choose for each prompt, one after the other while it is
                 computed, for all drafts of the row:

                     router of layer l    p_t = sigmoid(w_l x_t + b_l), x_t the layer's input
                     open                 y = layer(x), where the mean of p_t over the prompt
                                          without its last token (of one token: p_t) is above 1/2
                     closed               y = x + B A x, a trained map of rank r; r = 0: y = x

                 With all layers open the draft is the target itself. Jain et al., "FiRST:
                 Finetuning Router-Selective Transformers for Input-Adaptive Latency Reduction"
                 (arXiv 2410.12513). There what is left decodes by itself, and LoRA adapters in all
                 layers make up for those that are skipped

No weights of the target are copied, and the draft has keys and values of its own: those of a
skipping pass are not those of a whole one.

Guarantee: that of the verifier, whatever the plan, the layer or the maps. ``gen.recipes.drafters``
trains them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value
from gen.core.method import method
from gen.core.params import Params, integer, text
from gen.core.registry import register, registry
from gen.models.adapters.layer_plans import KEPT_LAYERS, kept_layers
from gen.samplers.causal.drafters.model import ModelDrafts


@dataclass(frozen=True)
class LayerSkipParams(Params):
    """Parameters of the drafter.

    Attributes:
        kept_layers: share of the layers, or the numbers of the layers that are kept.
    """

    kept_layers: str = text("1/2", KEPT_LAYERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan(None)

    def plan(self, num_layers: int | None) -> tuple[int, ...]:
        """List the kept layers of a model; see ``gen.models.adapters.layer_plans.kept_layers``."""
        return kept_layers(self.kept_layers, num_layers)


@dataclass(frozen=True)
class EarlyExitParams(Params):
    """Parameters of the drafter.

    Attributes:
        exit_layer: layers before the head.
    """

    exit_layer: int = integer(1, least=1)

    def plan(self, num_layers: int) -> tuple[int, ...]:
        """List the kept layers of a model. Raises ``GenError`` for more than it has."""
        if self.exit_layer > num_layers:
            expected = f"at most {num_layers}, the layers that the model has"
            raise bad_value("sampler.exit_layer", self.exit_layer, expected)
        return tuple(range(self.exit_layer))


class _SomeLayers(ModelDrafts):
    """Drafts with some of the target's layers, by the plan of the part's parameters."""

    needs_draft_model = False

    @classmethod
    def draft_of(cls, sampler, target, draft):
        plan = sampler.params_of("drafter").plan
        return registry.get("drafting", "layers")(target, sampler.drafter, plan)


@method(
    "layer_skip",
    sampler="speculative",
    about="drafts with half of the target's own layers, spread evenly",
    paper="2404.06954",
    title="Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy",
    params={"drafter": "layer_skip"},
)
@register("drafter", "layer_skip", params=LayerSkipParams)
class LayerSkip(_SomeLayers):
    """Drafts with some of the target's own layers. Parameters: ``kept_layers``, and those of the
    drafter model without ``draft_model``."""


@register("drafter", "early_exit", params=EarlyExitParams)
class EarlyExit(_SomeLayers):
    """Drafts with the target's first layers. Parameters: ``exit_layer``, and those of the drafter
    model without ``draft_model``."""


class _Altered(ModelDrafts):
    """Drafts with the target's network and a trained one in it. Parameters: ``drafter_weights``,
    and those of the drafter model without ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        return registry.get("drafting", sampler.drafter)(target, sampler.drafter_weights)


@register("drafter", "exit")
class Exit(_Altered):
    """Drafts with the target's first layers and a trained layer behind them."""


@register("drafter", "skip")
class Skip(_Altered):
    """Drafts with some of the target's own layers, and trained low-rank maps in the place of the
    others."""


@register("drafter", "lora_drop")
class LoraDrop(_Altered):
    """Drafts with the target, some of whose layers run at every n-th token alone and are corrected
    in between."""


@register("drafter", "router")
class Router(_Altered):
    """Drafts with those of the target's own layers that trained routers choose for the prompt."""
