"""A lean forward of the Llama architecture, with transformers' weights and nothing else of it.

What transformers' own forward does per call besides arithmetic (output classes, hooks, mask and
cache negotiation, rotations made anew) takes longer than the arithmetic of a small model, and
decoding is many small calls. Here rotations and learned places are tables made once per target, and
a layer is about twenty kernels.

    x = embed(token) (+ located(position))
    x = x + O softmax(R(Q h) R(K h)' / sqrt(d) + mask) V h      h = rms(x)
    x = x + D (silu(G h) * U h)                                 h = rms(x)
    logits = head(rms(x))

Guarantee: the logits are those of the module up to rounding, in any dtype. ``LeanLlama.of`` says no
(None) to a module that is not exactly this architecture, with plain layers, plain rotations and no
hooks; such a one is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from gen.models.nets.grid import GridLlamaForCausalLM

GRAPHS = 64  # of all models of a process, up to four for each
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LeanLlama:
    """``model``: a ``LlamaForCausalLM`` or the embedded one on the grid. What is kept are its
    parameters themselves, no copies, gathered once since asking a module for one costs as much as a
    small kernel. Make one per target: parameters that were put in place of others since then are
    not seen."""

    def __init__(self, model: LlamaForCausalLM):
        self.model = model
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
            # there the module's norms, which reckon in float32 whatever the dtype, are what is to
            # be equalled
            self.norm = self.norm.weight
            self.layers = [((a[0].weight, *a[1:]), (m[0].weight, *m[1:])) for a, m in self.layers]

    @classmethod
    def of(cls, model: nn.Module) -> LeanLlama | None:
        """None for a module that ``run`` would not do justice to."""
        return (
            cls(model)
            if type(model) in (LlamaForCausalLM, GridLlamaForCausalLM) and _plain(model)
            else None
        )

    def tables(self, slots: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the positions 0 .. slots - 1: cosines and sines [slots, 1, d] of the rotation, with
        the sign that belongs to them, and the learned places [slots, D] of a model on a grid."""
        at = torch.arange(slots, device=self.embedding.device)[None]
        cos, sin = self.model.model.rotary_emb(self.embedding[:1, None], at)
        half = self.dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        located = self.model.locate(at)[0] if hasattr(self.model, "locate") else None
        return cos[0, :, None], sin[0, :, None], located

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor, Tensor | None],
        attend: Attend,
        keep: int = 0,
    ) -> Tensor:
        """Logits [B, L, V] of tokens [B, L] at absolute positions [B, L], or of the last ``keep``.
        ``attend(layer, q, k, v)``: what queries [B, L, H, d] see, given keys and values [B, L, K,
        d] of the same tokens: [B, L, H d]."""
        linear, (b, length) = F.linear, tokens.shape
        cos, sin, located = tables
        cos, sin = cos[positions], sin[positions]  # [B, L, 1, d]
        x = F.embedding(tokens, self.embedding)
        if located is not None:
            x = x + located[positions]
        own, shared = (b, length, self.heads, self.dim), (b, length, self.groups, self.dim)
        for layer, ((before, q, k, v, o), (after, gate, up, down)) in enumerate(self.layers):
            h = self._rms(x, before)
            seen = attend(
                layer,
                _turned(linear(h, q).view(own), cos, sin),
                _turned(linear(h, k).view(shared), cos, sin),
                linear(h, v).view(shared),
            )
            x = linear(seen, o).add_(x)
            h = self._rms(x, after)
            x = linear(F.silu(linear(h, gate)).mul_(linear(h, up)), down).add_(x)
        x = x[:, -keep:] if keep else x
        return linear(self._rms(x, self.norm), self.head)

    def _rms(self, x: Tensor, norm: Tensor | nn.Module) -> Tensor:
        return (
            torch.rms_norm(x, norm.shape, norm, self.eps) if isinstance(norm, Tensor) else norm(x)
        )


def against_slots(
    lean: LeanLlama,
    tokens: Tensor,
    positions: Tensor,
    tables: tuple,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor,
    keep: int,
) -> Tensor:
    """``run`` as a function of tensors alone, of shapes that do not change from call to call: keys
    and values [B, S, K, d] per layer, all of whose slots are read under ``mask`` [B, 1, L, S]."""
    row = torch.arange(len(tokens), device=tokens.device)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[layer][row, positions], values[layer][row, positions] = k, v
        return attention(q, keys[layer], values[layer], mask)

    return lean.run(tokens, positions, tables, attend, keep)


def among_themselves(
    lean: LeanLlama,
    tokens: Tensor,
    positions: Tensor,
    tables: tuple,
    mask: Tensor | None,
    keep: int,
) -> Tensor:
    """``run`` likewise, where all that is seen are the tokens themselves, under ``mask`` or all of
    them."""
    return lean.run(
        tokens, positions, tables, lambda layer, q, k, v: attention(q, k, v, mask), keep
    )


@cache
def compiled(
    device: str, backend: str = "inductor", function: Callable[..., Tensor] = against_slots
) -> Callable[..., Tensor]:
    """One of the two through ``torch.compile``; CUDA graphs on a GPU."""
    more: dict[str, Any] = (
        {"mode": "reduce-overhead"} if device == "cuda" and backend == "inductor" else {}
    )
    if (
        "recompile_limit" in signature(torch.compile).parameters
    ):  # older ones stop at eight graphs, whatever is said
        more["recompile_limit"] = GRAPHS
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True, **more)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, L, H, d] over keys and values [B, S, K, d]; ``mask`` float, broadcastable to [B,
    1, L, S], or None: all are seen. [B, L, H d]."""
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, **grouped
    )
    return out.transpose(1, 2).flatten(2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated by the angles of its place: x cos + (-x2, x1) sin, the sign being in ``sin``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _plain(model: nn.Module) -> bool:
    config = model.config
    said = (
        config.hidden_act == "silu",
        not config.attention_bias,
        not config.mlp_bias,
        getattr(config, "pretraining_tp", 1) == 1,
        config.rope_parameters.get("rope_type", "default") == "default",
        config._attn_implementation in ("sdpa", "eager", None),
    )
    layers = (m for m in model.modules() if type(m) is not nn.Linear and hasattr(m, "in_features"))
    hooked = (
        m
        for m in model.modules()
        if m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook")
    )
    devices = {p.device for p in model.parameters()}
    return (
        all(said)
        and "forward" not in vars(model)
        and not model.training
        and next(layers, None) is None
        and next(hooked, None) is None
        and len(devices) == 1
    )
