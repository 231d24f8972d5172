"""Tiny Llama checkpoints in the published layout."""

from __future__ import annotations

import torch

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


KINDS = ("llama", "qwen3", "gpt_neox")


def tiny(name: str, seed: int = 0):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen3Config

    config = {
        "llama": lambda: LlamaConfig(num_key_value_heads=1, **SHAPE),
        "qwen3": lambda: Qwen3Config(num_key_value_heads=2, head_dim=16, **SHAPE),
        "gpt_neox": lambda: GPTNeoXConfig(**SHAPE),
    }[name]()
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).double().eval()
