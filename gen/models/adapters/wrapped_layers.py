"""Decoder layers with something else in their position, which know the KV cache of a call.

A wrapped layer is called by its network as the layer was, and calls the layer as the network would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.layer_calls import decoder_layers
from gen.models.adapters.layer_plans import layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.load.cache_argument import cache_in, with_cache


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
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Map hidden states [B, L, D] as ``states`` does; see ``call_layer``."""
        cache = cache_in(arguments)

        def run(mask: Tensor | None) -> Tensor:
            out = self.layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                **with_cache(self.layer, cache),
                **arguments,
            )
            return out[0] if isinstance(out, tuple) else out

        assert position_ids is not None, "adapters say where tokens stand"
        return self.states(hidden_states, position_ids, attention_mask, cache, run)

    def states(
        self,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        run: Callable[[Tensor | None], Tensor],
    ) -> Tensor:
        """Map hidden states.

        Args:
            states: [B, L, D].
            positions: absolute positions, long [B, L].
            mask: what is added to scores, [B, 1, L, S].
            cache: ``SlotCache`` or ``SequenceCache``.
            run: runs the layer on the states with a mask.
        """
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
