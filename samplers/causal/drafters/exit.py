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

import copy
from typing import cast

from torch import nn

from gen.core.errors import bad_value
from gen.core.registry import register
from gen.models.adapters.layer_plans import keep_layers, layers_of
from gen.models.adapters.protocols import SharedModel
from gen.samplers.causal.drafters.altered import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "exit"


def exit_layer(model: SharedModel, layers: int) -> nn.Module:
    """Make the layer behind the first ones, with the weights of the network's last layer.

    Args:
        model: the target's model.
        layers: layers before the exit.

    Raises:
        GenError: the model has no layer behind these.
    """
    if not 0 < layers < model.num_layers:
        raise bad_value("exit_layer", layers, f"from 1 to {model.num_layers - 1}")
    found = cast(nn.ModuleList, model.model.get_submodule(layers_of(model.model, model.num_layers)))
    # its keys and values have the slots of the layer that it stands for
    own = copy.deepcopy(found[layers])
    own.load_state_dict(found[-1].state_dict())
    return own.requires_grad_(True)


def exit_model(model: SharedModel, layers: int, own: nn.Module) -> SharedModel:
    """Make the model of the first layers and a layer behind them (``exit_layer``)."""
    return model.with_network(keep_layers(model.model, range(layers), model.num_layers, own))


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
