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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.registry import register
from gen.models.adapters.layer_calls import decoder_layers
from gen.models.adapters.layer_plans import layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.samplers.causal.drafters.altered import altered_target
from gen.samplers.causal.drafters.layer_skip import LayerSkipParams
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "skip"


class Repair(nn.Module):
    """Map in the place of a decoder layer.

    Args:
        width: channels D.
        rank: channels r in between.
    """

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map hidden states [B, L, D]; what else a decoder layer takes is not read."""
        x = hidden_states
        return x + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class Repairs(nn.Module):
    """Maps of all layers that are left out.

    Args:
        width: channels D.
        rank: rank of the maps.
        skipped: numbers of these layers.
    """

    def __init__(self, width: int, rank: int, skipped: tuple[int, ...]):
        super().__init__()
        self.maps = nn.ModuleDict({str(n): Repair(width, rank) for n in skipped})

    def forward(self, number: int, states: Tensor) -> Tensor:
        """Map the hidden states [B, L, D] of one layer."""
        return self.maps[str(number)](states)


def repairs_of(model: SharedModel, net: Mapping[str, Any]) -> Repairs:
    """Make the maps from the arguments of a folder: ``kept_layers`` and ``rank``.

    Raises:
        GenError: the plan has a layer that the model lacks.
    """
    kept = LayerSkipParams(net["kept_layers"]).plan(model.num_layers)
    skipped = tuple(n for n in range(model.num_layers) if n not in kept)
    torch.manual_seed(0)
    return Repairs(model.config.hidden_size, int(net["rank"]), skipped)


def repaired_model(model: SharedModel, repairs: Repairs) -> SharedModel:
    """Make the model with maps in the place of layers."""
    own = dict(repairs.maps.items())
    layers = [own.get(str(n), layer) for n, layer in enumerate(decoder_layers(model))]
    name = layers_of(model.model, model.num_layers)
    return model.with_network(replaced(model.model, name, nn.ModuleList(layers)))


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
