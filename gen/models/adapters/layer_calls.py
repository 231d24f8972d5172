"""Calls of single decoder layers of a network, with keys and values of one's own beside theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from gen.models.adapters.layer_plans import layers_of
from gen.models.adapters.protocols import SharedModel
from gen.models.load.cache_argument import with_cache

NORM = "model.norm"  # of Llama and its relatives
KeysValues = tuple[Tensor, Tensor]  # [B, G, S, d] each


class LayerCache:
    """What a decoder layer takes for a cache: it attends to given slots, then to its own.

    Args:
        before: keys and values of the given slots, by layer.

    Attributes:
        made: keys and values of the last call's own tokens, by layer.
    """

    def __init__(self, before: Mapping[int, KeysValues] | None = None):
        self.before, self.made = before or {}, {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> KeysValues:
        """Note keys and values [B, G, L, d] of a layer; return all that it attends to."""
        self.made[layer] = keys, values
        if layer not in self.before:
            return keys, values
        given, said = self.before[layer]
        return torch.cat([given.to(keys), keys], 2), torch.cat([said.to(values), values], 2)


class SequenceCache(LayerCache):
    """What a layer takes for a cache in a call over whole sequences, whose slots are its columns.

    Args:
        starts: slot of the last token of each prompt, long [B, 1].
        slots: columns S.
    """

    def __init__(self, starts: Tensor, slots: int):
        super().__init__()
        self.starts, self.slots = starts, slots
        self.positions = torch.arange(slots, device=starts.device).expand(len(starts), -1)
        self._notes: dict[str, Tensor] = {}

    def note(self, name: str, values: Tensor) -> Tensor:
        """Note values [B, S, C] under a name, and return them."""
        self._notes[name] = values
        return values

    def noted(self, name: str) -> Tensor:
        """Return the values under a name."""
        return self._notes[name]


def decoder_layers(model: SharedModel) -> nn.ModuleList:
    """Return the decoder layers of a model's network."""
    name = layers_of(model.model, model.num_layers)
    return cast(nn.ModuleList, model.model.get_submodule(name))


def call_layer(
    layer: nn.Module,
    states: Tensor,
    positions: Tensor,
    rotations: KeysValues,
    mask: Tensor | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """Run one decoder layer.

    Args:
        layer: decoder layer of transformers.
        states: hidden states [B, L, D].
        positions: absolute positions, long [B or 1, L].
        rotations: cosines and sines of the positions, as the network makes them.
        mask: what is added to scores, [B, 1, L, S]; None is causal attention.
        cache: keys and values beside those of the states.

    Returns:
        Hidden states [B, L, D].
    """
    cos, sin = (x.to(states.dtype) for x in rotations)
    out = layer(
        states,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=(cos, sin),
        **with_cache(layer, cache),
    )
    return out[0] if isinstance(out, tuple) else out


def run_layers(
    model: SharedModel,
    first: int,
    states: Tensor,
    positions: Tensor,
    mask: Tensor | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """Run the decoder layers of a model from a number on; arguments and result of ``call_layer``.

    Args:
        model: the model.
        first: number of the first layer.
        states: hidden states before it, [B, L, D].
        positions: absolute positions, long [B or 1, L].
        mask: what is added to scores, [B, 1, L, S]; None is causal attention.
        cache: keys and values beside those of the states.
    """
    rotations = model.rotations(states, positions)
    for layer in decoder_layers(model)[first:]:
        states = call_layer(layer, states, positions, rotations, mask, cache)
    return states


def drafted_logits(model: SharedModel, states: Tensor) -> Tensor:
    """Return the logits [..., V] of states behind the last layer."""
    head = model.output_weight
    hidden = model.model.get_submodule(NORM)(states.to(head.dtype))
    return nn.functional.linear(hidden, head)
