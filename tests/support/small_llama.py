"""A Llama of random weights, small and sure of itself, so that decoding it says something."""

from __future__ import annotations

import torch
from compiling import grown
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(vocab_size: int, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return grown(LlamaForCausalLM(config))
