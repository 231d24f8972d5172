"""Fast forward pass of the Llama architecture over transformers' weights.

The overhead of transformers' own forward pass (output classes, hooks, mask and cache negotiation,
recomputed rotations) takes longer than the arithmetic of a small model, and decoding runs many
small passes. Here rotations and location embeddings are tables built once per target, and a layer
is about twenty kernels.

    x = embed(token) (+ located(position))
    x = x + O softmax(R(Q h) R(K h)' / sqrt(d) + mask) V h      h = rms(x)
    x = x + D (silu(G h) * U h)                                 h = rms(x)
    logits = head(rms(x))

Guarantee: the logits equal those of the module up to rounding, in any dtype. ``LeanLlama.of``
returns None for a module that is not exactly this architecture, with plain layers, plain rotations
and no hooks; such a module is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from gen.models.adapters import batch_invariant
from gen.models.adapters.masks import CAUSAL, Mask
from gen.models.adapters.windows import windows_of
from gen.models.load.networks import config_field
from gen.models.load.transformers_compat import attention_implementation
from gen.models.nets.grid import GridLlamaForCausalLM

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LeanLlama:
    """Fast forward pass over a ``LlamaForCausalLM`` or the built-in one on the grid.

    It refers to the model's parameters without copies, collected once, since an attribute look-up
    on a module costs as much as a small kernel. Build one per target: parameters replaced later are
    not seen.
    """

    def __init__(self, model: LlamaForCausalLM):
        self.model, self.product, self.activation = model, F.linear, F.silu
        config, trunk = model.config, model.model
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = trunk.layers[0].self_attn.head_dim, trunk.norm.variance_epsilon
        self.embedding, self.norm, self.head = (
            trunk.embed_tokens.weight,
            trunk.norm,
            model.lm_head.weight,
        )
        self.layers = [
            (
                (
                    x.input_layernorm,
                    a.q_proj.weight,
                    a.k_proj.weight,
                    a.v_proj.weight,
                    a.o_proj.weight,
                ),
                (
                    x.post_attention_layernorm,
                    m.gate_proj.weight,
                    m.up_proj.weight,
                    m.down_proj.weight,
                ),
            )
            for x, a, m in ((x, x.self_attn, x.mlp) for x in trunk.layers)
        ]
        if self.embedding.dtype != torch.float64:
            # in float64 the module's norms stay, since they compute in float32 in any dtype
            self.norm = self.norm.weight
            self.layers = [((a[0].weight, *a[1:]), (m[0].weight, *m[1:])) for a, m in self.layers]

    @classmethod
    def of(cls, model: nn.Module) -> LeanLlama | None:
        """Wrap a module, or return None if ``run`` would not reproduce it."""
        is_known = type(model) in (LlamaForCausalLM, GridLlamaForCausalLM)
        return cls(model) if is_known and _is_plain(model) else None

    def tables(self, slots: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Build the tables of positions 0 .. slots - 1.

        Returns:
            Cosines and signed sines [slots, 1, d] of the rotation, and the location embeddings
            [slots, D] of a model on a grid, else None.
        """
        positions = torch.arange(slots, device=self.embedding.device)[None]
        cos, sin = self.model.model.rotary_emb(self.embedding[:1, None], positions)
        half = self.dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        on_grid = isinstance(self.model, GridLlamaForCausalLM)
        located = self.model.locate(positions)[0] if on_grid else None
        return cos[0, :, None], sin[0, :, None], located

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor, Tensor | None],
        attend: Attend,
        keep: int = 0,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Compute logits [B, L, V].

        Args:
            tokens: Token ids [B, L]. positions: Absolute positions [B, L]. tables: Tables of
            ``tables``. attend: ``attend(layer, q, k, v)`` maps queries [B, L, H, d], keys and
            values [B, L, K, d]
                of these tokens to attention outputs [B, L, H d].
            keep: Compute the logits of the last ``keep`` positions only; 0 means all.
            taps: Layers whose output [B, L, D] is wanted, which is written there; the number of
                layers is that of the last norm.
        """
        linear, activation, (b, length) = self.product, self.activation, tokens.shape
        cos, sin, located = tables
        cos, sin = cos[positions], sin[positions]  # [B, L, 1, d]
        x = F.embedding(tokens, self.embedding)
        if located is not None:
            x = x + located[positions]
        q_shape, kv_shape = (b, length, self.heads, self.dim), (b, length, self.groups, self.dim)
        for layer, ((before, q, k, v, o), (after, gate, up, down)) in enumerate(self.layers):
            h = self._rms(x, before)
            attended = attend(
                layer,
                _rotated(linear(h, q).view(q_shape), cos, sin),
                _rotated(linear(h, k).view(kv_shape), cos, sin),
                linear(h, v).view(kv_shape),
            )
            x = linear(attended, o).add_(x)
            h = self._rms(x, after)
            x = linear(activation(linear(h, gate)).mul_(linear(h, up)), down).add_(x)
            if taps is not None and layer in taps:
                taps[layer] = x
        x = self._rms(x[:, -keep:] if keep else x, self.norm)
        if taps is not None and len(self.layers) in taps:
            taps[len(self.layers)] = x
        return linear(x, self.head)

    def _rms(self, x: Tensor, norm: Tensor | nn.Module) -> Tensor:
        return (
            torch.rms_norm(x, norm.shape, norm, self.eps) if isinstance(norm, Tensor) else norm(x)
        )


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Attend from queries [B, L, H, d] to keys and values [B, S, K, d]: [B, L, H d].

    ``mask``: additive, broadcastable to [B, 1, L, S], ``CAUSAL``, or None for full attention.
    """
    is_causal = mask is CAUSAL
    added = None if is_causal else mask
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), added, 0.0, is_causal, **grouped
    )
    return out.transpose(1, 2).flatten(2)


def attend_in(cache: Any, mask: Mask | None) -> Attend:
    """Return attention to the slots of a cache."""
    return lambda layer, q, k, v: attention(q, *cache.write(layer, k, v), mask)


def attend_among(mask: Mask | None) -> Attend:
    """Return attention among the tokens of a call."""
    return lambda layer, q, k, v: attention(q, k, v, mask)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, L, H, d] by the angles of its positions: x cos + (-x2, x1) sin, with the sign in
    ``sin``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _is_plain(model: nn.Module) -> bool:
    """Return True for a Llama without variants that ``run`` does not implement."""
    config = model.config
    conditions = (
        config.hidden_act == "silu",
        not config.attention_bias,
        not config.mlp_bias,
        config_field(config, "pretraining_tp", 1) == 1,
        config.rope_parameters.get("rope_type", "default") == "default",
        attention_implementation(config) in ("sdpa", "eager", batch_invariant.NAME, None),
        not windows_of(config),
    )
    layers = (m for m in model.modules() if type(m) is not nn.Linear and hasattr(m, "in_features"))
    hooked = (
        m
        for m in model.modules()
        if m._forward_hooks
        or m._forward_pre_hooks
        or "_hf_hook" in vars(m)
        or batch_invariant.is_replaced(m)
    )
    devices = {p.device for p in model.parameters()}
    return (
        all(conditions)
        and not model.training
        and next(layers, None) is None
        and all(type(layer) is LlamaDecoderLayer for layer in model.model.layers)
        and next(hooked, None) is None
        and len(devices) == 1
    )
