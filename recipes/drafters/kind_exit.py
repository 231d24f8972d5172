"""Kind ``exit``: a layer of the model's own kind behind its first layers (Kangaroo).

It is trained on the hidden states that the model has at the exit, so that the layers before it run
once. Norm and head behind it are the model's and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.models.adapters.draft_models import exit_layer
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher


@dataclass(frozen=True)
class ExitOptions(Options):
    """Options of the kind.

    Attributes:
        exit_layer: layers of the model before the trained one.
    """

    exit_layer: int = 1


class TrainedLayer(nn.Module):
    """A decoder layer that is trained in whatever dtype its weights have."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, at: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """Run the layer with causal attention.

        Args:
            states: hidden states [B, S, D].
            at: positions, long [1, S].
            rotations: cosines and sines of the positions.
        """
        dtype = next(self.layer.parameters()).dtype
        cos, sin = (x.to(dtype) for x in rotations)
        out = self.layer(states.to(dtype), position_ids=at, position_embeddings=(cos, sin))
        return out[0] if isinstance(out, tuple) else out


class Exit(Kind):
    """A trained layer behind the model's first ones. Options: ``ExitOptions``."""

    name = "exit"
    is_model = True
    options_type = ExitOptions

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        return (f"model.layers.{self.options.exit_layer - 1}",)

    def arguments(self) -> dict[str, Any]:
        return {"exit_layer": self.options.exit_layer}

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        return dict(net.get_submodule("layer").named_parameters())

    def network(self) -> nn.Module:
        return TrainedLayer(exit_layer(self.teacher.model, self.options.exit_layer).float())

    def logq(self, net: Net, batch: Batch) -> Tensor:
        trunk = self.teacher.model.model.model
        states, slots = sequence_states(batch, self.teacher.layers[0])
        at = torch.arange(states.shape[1], device=states.device)[None]
        out = net(states, at, trunk.rotary_emb(states, at))
        row = torch.arange(len(slots), device=slots.device)[:, None]
        hidden = trunk.norm(out[row, slots].float())
        logits = self.teacher.model.model.get_output_embeddings()(hidden)
        return self.logprobs(logits, self.positions(batch))


def sequence_states(batch: Batch, layer: str) -> tuple[Tensor, Tensor]:
    """Return the hidden states of prompts and tokens in one row.

    Args:
        batch: sequences with the states of the layer.
        layer: name of the layer.

    Returns:
        States [B, P - 1 + T, D] by slot, those behind a row's last token being anything; and the
        slots of the positions' inputs, long [B, T]: the token before each.
    """
    prompts, states = batch.prompt_states.get(layer), batch.states[layer]
    before = batch.inputs()[1]
    if prompts is None:  # prompts of one token, whose state is the first position's
        return states, before
    length = prompts.shape[1] + states.shape[1]
    slot = torch.arange(length, device=states.device)
    at = slot - (batch.prompt_length[:, None] - 1)
    row = torch.arange(len(states), device=states.device)[:, None]
    own = states[row, at.clamp(0, states.shape[1] - 1)]
    given = prompts[:, slot.clamp_max(prompts.shape[1] - 1)]
    return torch.where((at < 0)[..., None], given, own), before
