"""Decoder layers with something else in their position, which know the KV cache of a call.

A wrapped layer is called by its network as the layer was, and calls the layer as the network would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.layer_calls import decoder_layers
from gen.models.adapters.layer_plans import layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.load.cache_argument import cache_in, with_cache


@dataclass(frozen=True)
class LayerCall:
    """A call of a decoder layer.

    Attributes:
        layer: the decoder layer.
        states: hidden states [B, L, D].
        positions: absolute positions, long [B, L].
        mask: what is added to scores, [B, 1, L, S].
        cache: ``SlotCache`` or ``SequenceCache``.
        arguments: what else the network passes to its layers.
    """

    layer: nn.Module
    states: Tensor
    positions: Tensor
    mask: Tensor
    cache: Any
    arguments: Mapping[str, Any]

    def run(self, mask: Tensor, columns: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            mask: another mask [B, 1, L, S].
            columns: tokens of the call that it runs at, long [B, N], any of them repeatedly; None
                for all.

        Returns:
            Hidden states [B, L or N, D].
        """
        if columns is None:
            return self._run(self.states, mask, self.positions, self.arguments)
        row = torch.arange(len(columns), device=columns.device)[:, None]
        arguments = {**self.arguments, "position_embeddings": self.rotations(columns)}
        with self.cache.only(columns):
            states, mask = self.states[row, columns], mask[row, 0, columns][:, None]
            return self._run(states, mask, self.positions[row, columns], arguments)

    def rotations(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of tokens of the call, long [B, N]: [B, N, d]."""
        row = torch.arange(len(columns), device=columns.device)[:, None]
        cos, sin = self.arguments["position_embeddings"]
        return cos[row, columns], sin[row, columns]

    def _run(
        self, states: Tensor, mask: Tensor, positions: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        out = self.layer(
            states,
            attention_mask=mask,
            position_ids=positions,
            **with_cache(self.layer, self.cache),
            **arguments,
        )
        return out[0] if isinstance(out, tuple) else out


class WrappedLayer(nn.Module):
    """Base class of what stands in the position of a decoder layer.

    Args:
        layer: the decoder layer.
        number: its number.
    """

    def __init__(self, layer: nn.Module, number: int):
        super().__init__()
        self.layer, self.number = layer, number

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        **arguments: Any,
    ) -> Tensor:
        """Map hidden states [B, L, D]; arguments as a decoder layer of transformers has them."""
        cache = cache_in(arguments)
        return self.states(
            LayerCall(self.layer, hidden_states, position_ids, attention_mask, cache, arguments)
        )

    def states(self, call: LayerCall) -> Tensor:
        """Return the hidden states [B, L, D] that the call gives."""
        raise NotImplementedError


def with_wrapped(model: SharedModel, wrap: Callable[[nn.Module, int], nn.Module]) -> SharedModel:
    """Make the same model with something in the position of each layer.

    Args:
        model: the model.
        wrap: makes it of a layer and its number; it may return the layer.

    Raises:
        GenError: the model's masks are block masks, which say nothing of single slots.
    """
    if isinstance(model, ModelAdapter) and model.takes_block_masks:
        raise GenError(
            "layers with something else in their position need masks that are added to scores, and"
            " the model's attention is flex_attention; expected sdpa or eager"
        )
    layers = [wrap(layer, n) for n, layer in enumerate(decoder_layers(model))]
    name = layers_of(model.model, model.num_layers)
    return model.with_network(replaced(model.model, name, nn.ModuleList(layers)))


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return the mask of causal attention in a sequence, [1, 1, S, S], in the dtype of a tensor."""
    later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    return (later.to(like.dtype) * torch.finfo(like.dtype).min)[None, None]
