"""Drafts of the target itself with some of its layers left out.

    layer_skip   any plan of layers, ``kept_layers``: a share of them, spread evenly from the first
                 to the last, or their numbers. Liu et al., "Accelerating Inference in Large
                 Language Models with a Unified Layer Skipping Strategy" (arXiv 2404.06954), whose
                 plan is the same for every input. There the skipping model decodes by itself
    early_exit   the first ``exit_layer`` layers and the head. Liu et al., "Kangaroo" (arXiv
                 2404.18911), without the adapter that it trains between the two

No weights are copied or loaded, and the draft has keys and values of its own: those of a skipping
pass are not those of a whole one.

Guarantee: that of the verifier, whatever the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value
from gen.core.method import method
from gen.core.params import Params, integer, text
from gen.core.registry import register
from gen.models.adapters.layer_plans import KEPT_LAYERS, kept_layers
from gen.models.targets.trained_drafters import layered_target
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
        return layered_target(target, sampler.drafter, sampler.params_of("drafter").plan)


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
