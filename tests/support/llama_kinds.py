"""Tiny Llamas of every kind that the lean forward takes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM

SMALL = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
KINDS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4)),
    "grouped": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "wide heads": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=1, head_dim=16)
    ),
    "tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True)
    ),
    "grid": lambda: GridLlamaForCausalLM(
        GridLlamaConfig(
            **SMALL, num_key_value_heads=4, grid=(4, 5), prefix_length=3, codebook_size=32
        )
    ),
}


def make(kind: str, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    for p in model.parameters():
        (
            p.data.mul_(3) if p.dim() > 1 else p.data.mul_(1 + 0.3 * torch.randn_like(p))
        )  # norms that are not all ones, and logits far apart
    return model.to(dtype)
