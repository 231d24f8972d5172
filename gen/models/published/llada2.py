"""LLaDA2: a masked language model with full attention inside blocks, causal attention across them,
and a mixture of experts.

    block(i) = i div B                       blocks are counted from the first token of the whole
                                             text, prompt included
    i attends to j iff block(j) <= block(i)  the logits at i predict position i itself

    s_e = sigmoid(w_e h),  b_e = s_e + bias_e            the bias affects the choice, not the weight
    groups: the ``topk_group`` of ``n_group`` with the highest sum of their two largest b; experts:
    the k largest b inside of them
    y = shared(h) + c sum_e s_e / (sum s) expert_e(h)    over the chosen, c =
                                                         ``routed_scaling_factor``

Queries and keys are normalised per head and rotated in the first half of their channels
(``partial_rotary_factor``); the first ``first_k_dense_replace`` layers have one wide MLP instead of
experts. LLaDA2.0 and LLaDA2.1, arXiv 2512.15745. Parameters have their published names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

from gen.core.errors import GenError
from gen.models.adapters.language_models import BlockLM, MaskedLM
from gen.models.adapters.slot_cache import SlotCache

MINI = {  # published fields of LLaDA2-mini, and the positions of a block
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6e5,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 32768,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "block_length": 32,
}


class LLaDA2Config(PreTrainedConfig):
    """Config with the published fields and ``block_length``, by default ``MINI``. Without a
    ``head_dim`` the heads share ``hidden_size``."""

    model_type = "llada2_moe"

    def __init__(self, **fields):
        values = {key: fields.pop(key, value) for key, value in MINI.items()}
        super().__init__(**fields)
        for key, value in values.items():
            setattr(self, key, value)
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads


def exact(x: Tensor) -> Tensor:
    """Convert to float32 at least: norms, angles and the router do not work in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def block_causal(
    positions: Tensor, key_positions: Tensor, block_length: int, dtype: torch.dtype
) -> Tensor:
    """Build the additive mask [B, 1, L, S] of attention to the same and earlier blocks.

    ``positions``: of queries [B, L]. ``key_positions``: of keys [B, S]; negative ones are padding.
    """
    query_blocks, key_blocks = positions // block_length, key_positions // block_length
    hidden = (key_blocks[:, None] > query_blocks[..., None]) | (key_positions < 0)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, torch.finfo(dtype).min
    )[:, None]


class Norm(nn.Module):
    """RMS norm: x / sqrt(mean x^2 + eps), times a weight per channel."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = exact(x)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


def rotation(
    positions: Tensor, size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [B, 1, L, size / 2] of the angles at positions [B, L]."""
    rate = theta ** -(torch.arange(0, size, 2, device=positions.device).float() / size)
    angle = (positions[..., None].float() * rate)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [B, H, L, D], the i-th of their first half with the i-th of
    the second."""
    n = cos.shape[-1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: LLaDA2Config, layer: int):
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.size = (
            layer,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.query_key_value = nn.Linear(
            config.hidden_size,
            (self.heads + 2 * self.kv_heads) * self.size,
            bias=config.use_qkv_bias,
        )
        self.query_layernorm, self.key_layernorm = (
            Norm(self.size, config.rms_norm_eps),
            Norm(self.size, config.rms_norm_eps),
        )
        self.dense = nn.Linear(self.heads * self.size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, cache) -> Tensor:
        fused = self.query_key_value(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = rotated(self.query_layernorm(q), *turn), rotated(self.key_layernorm(k), *turn)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.dense(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: LLaDA2Config, size: int):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(config.hidden_size, size, bias=False),
            nn.Linear(config.hidden_size, size, bias=False),
        )
        self.down_proj, self.act = (
            nn.Linear(size, config.hidden_size, bias=False),
            ACT2FN[config.hidden_act],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Linear):
    """Router: experts [N, k] and weights [N, k] of positions [N, D]."""

    def __init__(self, config: LLaDA2Config):
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        self.groups, self.kept_groups, self.k, self.scale = (
            config.n_group,
            config.topk_group,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = F.linear(exact(x), exact(self.weight)).sigmoid()
        biased = score + self.expert_bias.to(score.dtype)
        inside = biased.unflatten(-1, (self.groups, -1))
        worth = inside.topk(2, -1).values.sum(-1)
        open = torch.zeros_like(worth, dtype=torch.bool).scatter_(
            -1, worth.topk(self.kept_groups, -1).indices, True
        )
        chosen = (
            inside.masked_fill(~open[..., None], -torch.inf).flatten(-2).topk(self.k, -1).indices
        )
        weight = score.gather(-1, chosen)
        return (
            chosen,
            (weight / (weight.sum(-1, keepdim=True) + 1e-20) if self.k > 1 else weight)
            * self.scale,
        )


class Experts(nn.Module):
    """Mixture of experts with optional shared experts."""

    def __init__(self, config: LLaDA2Config):
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            MLP(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_experts = (
            MLP(config, config.moe_intermediate_size * config.num_shared_experts)
            if config.num_shared_experts
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weight = self.gate(flat)
        y = torch.zeros_like(flat, dtype=weight.dtype)
        for e in chosen.unique().tolist():
            row, slot = (chosen == e).nonzero(as_tuple=True)
            y.index_add_(0, row, self.experts[e](flat[row]).to(y.dtype) * weight[row, slot, None])
        y = y.to(x.dtype).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Layer(nn.Module):
    """Transformer layer with an MLP or experts."""

    def __init__(self, config: LLaDA2Config, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.mlp = (
            MLP(config, config.intermediate_size)
            if layer < config.first_k_dense_replace
            else Experts(config)
        )
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, cache) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), turn, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LLaDA2(PreTrainedModel):
    """LLaDA2 with the call interface of transformers' language models."""

    config_class = LLaDA2Config
    _no_split_modules = ["Layer"]

    def __init__(self, config: LLaDA2Config):
        super().__init__(config)
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: SlotCache | None = None,
        logits_to_keep: int = 0,
        **_,
    ) -> CausalLMOutputWithPast:
        """Compute ``logits`` [B, L, V] of token ids [B, L].

        Args:
            input_ids: Token ids [B, L].
            attention_mask: Additive [B, 1, L, S], used as it is; or [B, L] with 0 at padding, or
                None, for the block-causal mask over all positions of this call.
            position_ids: Positions [B, L], by default 0, 1, ...
            cache: KV cache; requires a 4-D mask.
            logits_to_keep: Compute the logits of the last positions only; 0 means all.

        Raises:
            ValueError: A cache without a 4-D mask.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        position_ids = position_ids.expand_as(input_ids)
        x = self.model.word_embeddings(input_ids)
        if attention_mask is None or attention_mask.ndim == 2:
            if cache is not None:
                raise ValueError("a cache came without an attention mask; expected a 4-D mask")
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            attention_mask = block_causal(
                position_ids,
                position_ids.masked_fill(real == 0, -1),
                self.config.block_length,
                x.dtype,
            )
        turn = rotation(
            position_ids,
            int(self.config.head_dim * self.config.partial_rotary_factor),
            self.config.rope_theta,
            x.dtype,
        )
        for layer in self.model.layers:
            x = layer(x, turn, attention_mask, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x[:, -logits_to_keep:])))


class BlockCausalLM(MaskedLM):
    """Masked model of the whole canvas under the block-causal mask.

    Later blocks do not affect earlier ones, so the caches ``prefix`` and ``dual`` are exact if the
    sampler's blocks are the model's (``align_blocks``).
    """

    compiles = False  # which experts run depends on values
    shift = 0

    @torch.no_grad()
    def forward(
        self, ids: Tensor, canvas_length: int, left_padding: Tensor | None = None
    ) -> Tensor:
        """Compute logits [B, T, V] of the last T of token ids [B, P + T]; ``left_padding`` [B]."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions = positions if left_padding is None else positions - left_padding[:, None]
        mask = block_causal(positions.clamp_min(0), positions, self.config.block_length, self.dtype)
        return self.model(
            input_ids=ids,
            position_ids=positions.clamp_min(0),
            attention_mask=mask,
            logits_to_keep=canvas_length,
        ).logits

    def _mask(
        self, positions: Tensor, seen: Tensor, cache: SlotCache, rows: Tensor | None
    ) -> Tensor:
        seen = super()._mask(positions, seen, cache, rows)
        slots = torch.arange(seen.shape[-1], device=seen.device)[None]
        return torch.minimum(
            seen, block_causal(positions, slots, self.config.block_length, self.dtype)
        )


class AlignedBlockLM(BlockLM):
    """Block model against a KV cache, with the model's own blocks.

    A sampler's block must be a block of the model, so the condition must end at a block boundary.
    """

    compiles = False  # which experts run depends on values

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: SlotCache) -> Tensor:
        """Compute logits of a block. Raises ``GenError`` if the condition ends inside a block."""
        size = self.block_length
        if bool(((last[:, -1] + 1) % size).any()):
            raise GenError(
                f"the condition has {int(last[0, -1] + 1) % size} tokens more than whole blocks of"
                f" {size}, which this model counts from the first token; expected a multiple for a"
                " sampler of blocks, or a masked one such as 'llada2', which takes any length"
            )
        return super().forward(tokens, positions, (positions // size + 1) * size - 1, cache)
