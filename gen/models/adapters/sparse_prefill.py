"""Prompts that skip layers: from some layer on, each layer runs at a part of a prompt's tokens.

    probe     s_j = mean over heads of softmax_j(q_e k_j / sqrt(d)), of the layer's own queries and
              keys; e the last token but one of the prompt, j <= e
    active    the ceil((1 - ratio) n) tokens with the largest s_j, of the n tokens up to e; and e
    active    y = layer(x), which attends to active tokens alone
    others    y = x; their keys and values are in no later token's sight at this layer

The last token of the prompt and those of the output run through all layers. A token that one layer
skips may be active in the next.

Wu et al., "Probe and Skip: Self-Predictive Token Skipping for Efficient Long-Context LLM Inference"
(arXiv 2601.13155). This is its probe of attention (PAP). There a layer's feed-forward part has
active tokens of its own, by a low-rank copy that is made of data; the number of active tokens is
fixed for stages of layers, which end with tokens that are left out for good; and e is the last
token, which here belongs to the first pass of the output.

Guarantee: none, the distribution is approximately the model's; with ratio 0 nothing is changed. The
skipping model is a model like any other to samplers: what is exact with it is exact for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.wrapped_layers import LayerCall, WrappedLayer, with_wrapped

EXPECTED = "a share such as 0.5, or {ratio: 0.5, first_layer: 1}"


@dataclass(frozen=True)
class SparsePrefill:
    """Parameters of prompts that skip layers.

    Attributes:
        ratio: share of a prompt's tokens that a layer skips, from 0 to below 1.
        first_layer: layers before it run at all tokens.
    """

    ratio: float
    first_layer: int = 1

    @classmethod
    def of(cls, value: Any) -> SparsePrefill | None:
        """Read the option of a pipeline. Raises ``GenError`` for anything else."""
        if value is None:
            return None
        given = value if isinstance(value, Mapping) else {"ratio": value}
        wrong = [key for key in given if key not in ("ratio", "first_layer")]
        if wrong:
            raise unknown("key", wrong[0], ("ratio", "first_layer"), "sparse_prefill")
        ratio, first = given.get("ratio"), given.get("first_layer", 1)
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool):
            raise bad_type("sparse_prefill", value, EXPECTED)
        if not 0 <= ratio < 1:
            raise bad_value("sparse_prefill", ratio, "a share from 0 to below 1")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise bad_value("sparse_prefill.first_layer", first, "a number of at least 0")
        return cls(float(ratio), first)

    @property
    def plain(self) -> dict[str, Any]:
        """The parameters as plain data."""
        return {"ratio": self.ratio, "first_layer": self.first_layer}


class SkippingLayer(WrappedLayer):
    """A layer that runs at a part of a prompt's tokens.

    Args:
        layer: the decoder layer, of the Llama architecture.
        number: its number.
        ratio: share of the tokens that it skips.
    """

    layer: LlamaDecoderLayer

    def __init__(self, layer: nn.Module, number: int, ratio: float):
        super().__init__(layer, number)
        self.ratio = ratio

    def states(self, call: LayerCall) -> Tensor:
        starts = call.cache.starts.to(call.states.device)
        prompt = call.positions < starts
        name = f"active {self.number}"
        if not bool((starts > 0).any()):  # prompts of one token, which skip nothing
            return call.run(call.mask)
        if not bool(prompt.any()):
            return call.run(self._seen(call.mask, call.cache.noted(name), starts))
        active = self._active(call, prompt, starts) | ~prompt
        seen = call.cache.note(name, active[..., None].to(call.states.dtype))
        # shorter prompts are padded with tokens of the same position, which one of them stands for
        every = torch.arange(active.shape[1], device=active.device)
        first = torch.searchsorted(call.positions.contiguous(), call.positions.contiguous())
        active = active & (first == every)
        # rows have different numbers of active tokens, and repeat their first one
        order = active.long().argsort(dim=1, descending=True, stable=True)
        count = active.sum(1, keepdim=True)
        column = torch.arange(int(count.max()), device=order.device).expand(len(order), -1)
        columns = order.gather(1, torch.where(column < count, column, 0))
        some = call.run(self._seen(call.mask, seen, starts), columns)
        row = torch.arange(len(columns), device=columns.device)[:, None]
        out = call.states.clone()
        out[row, columns] = some
        return out[row, first]

    def _seen(self, mask: Tensor, active: Tensor, starts: Tensor) -> Tensor:
        """Hide prompt tokens that the layer skipped in a mask [B, 1, L, S]."""
        slot = torch.arange(active.shape[1], device=mask.device)
        hidden = (slot < starts) & (active[..., 0] == 0)
        return torch.where(hidden[:, None, None], torch.finfo(mask.dtype).min, mask)

    def _active(self, call: LayerCall, prompt: Tensor, starts: Tensor) -> Tensor:
        """Find the active tokens of a call, bool [B, L]; of rows without a prompt there, any."""
        probe = (call.positions == starts - 1).long().argmax(1, keepdim=True)
        scores = self._scores(call, probe).masked_fill(~prompt, -torch.inf)
        scores = scores.scatter(1, probe, torch.inf)
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        count = torch.ceil((1 - self.ratio) * prompt.sum(1, keepdim=True).double())
        return rank < count.clamp_min(1)

    def _scores(self, call: LayerCall, probe: Tensor) -> Tensor:
        """Return how much the probe attends to each token of the call, [B, L].

        Args:
            call: the call.
            probe: column of the probe, long [B, 1].
        """
        own, states = self.layer.self_attn, self.layer.input_layernorm(call.states)
        batch, length = call.positions.shape
        row = torch.arange(batch, device=states.device)[:, None]
        every = torch.arange(length, device=states.device).expand(batch, -1)
        queries = own.q_proj(states[row, probe]).view(batch, 1, -1, own.head_dim)
        keys = own.k_proj(states).view(batch, length, -1, own.head_dim)
        queries = rotated(queries, call.rotations(probe))
        keys = rotated(keys, call.rotations(every))
        keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], 2)
        scores = torch.einsum("bqhd,blhd->bhl", queries, keys) * own.head_dim**-0.5
        later = call.positions > call.positions.gather(1, probe)
        return scores.masked_fill(later[:, None], -torch.inf).softmax(-1).mean(1)


def rotated(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, L, H, d] by the cosines and sines [B, L, d] of its positions."""
    cos, sin = (r[:, :, None] for r in rotations)
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def sparse(model: Any, how: SparsePrefill, name: str) -> Any:
    """Make the same model with prompts that skip layers; with ratio 0 the model itself.

    Args:
        model: adapter of the model.
        how: parameters.
        name: name of the model, for messages.

    Raises:
        GenError: the model is no causal one of the Llama architecture, or has too few layers.
    """
    if not how.ratio:
        return model
    if not isinstance(model, CausalLM):
        raise GenError(
            f"sparse_prefill is given, and model {name} is a {type(model).__name__}; expected a"
            " causal language model of tokens"
        )
    if how.first_layer >= model.num_layers:
        expected = f"at most {model.num_layers - 1}, the last layer of model {name}"
        raise bad_value("sparse_prefill.first_layer", how.first_layer, expected)

    def wrap(layer: nn.Module, number: int) -> nn.Module:
        if type(layer) is not LlamaDecoderLayer:
            raise GenError(
                f"sparse_prefill is given, and model {name} has layers {type(layer).__name__};"
                " expected those of the Llama architecture"
            )
        return layer if number < how.first_layer else SkippingLayer(layer, number, how.ratio)

    return with_wrapped(model, wrap)
