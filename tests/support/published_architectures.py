"""Tiny random models of published architectures, with both kinds of layers where they have two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY, WINDOW, POSITIONS = 64, 16, 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.4,  # large, so that what is attended to matters
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": WINDOW}
SECOND_SLIDES = {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}
HEADS = {"head_dim": 8}


def _config(name: str, **more: Any) -> Callable[..., Any]:
    return lambda **given: getattr(transformers, name)(**{**SIZES, **more, **given})


# the ten whose ids are compared with those of ``generate``
CONFIGS = {
    "llama3": _config("LlamaConfig"),
    "gemma3": _config(
        "Gemma3TextConfig",
        **SLIDING,
        **HEADS,
        sliding_window_pattern=2,
        query_pre_attn_scalar=8,
        tie_word_embeddings=False,
    ),
    "mistral": _config("MistralConfig", **SLIDING),
    "qwen2": _config("Qwen2Config", **SECOND_SLIDES),
    "qwen3": _config("Qwen3Config", **SECOND_SLIDES, **HEADS),
    "cohere2": _config("Cohere2Config", **SLIDING, sliding_window_pattern=2),
    "gpt_oss": _config(
        "GptOssConfig", **SLIDING, **HEADS, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": _config("Phi3Config", **SLIDING),
    "gpt2": _config("GPT2Config", n_embd=32, n_layer=2, n_head=4),
    "smollm3": _config(
        "SmolLM3Config",
        **SLIDING,
        use_sliding_window=True,
        no_rope_layer_interval=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
OTHERS = {
    "gemma2": _config(
        "Gemma2Config", **SLIDING, **HEADS, query_pre_attn_scalar=8, tie_word_embeddings=False
    ),
    "llama4": _config(
        "Llama4TextConfig",
        **HEADS,
        attention_chunk_size=WINDOW,
        no_rope_layer_interval=2,
        num_local_experts=2,
        intermediate_size_mlp=48,
    ),
}


def published(name: str, dtype: torch.dtype = torch.float64, **given: Any) -> Any:
    """Make a model of an architecture; ``given`` goes to its config."""
    torch.manual_seed(0)
    config = {**CONFIGS, **OTHERS}[name](**given)
    # grouped products of experts take no float64
    kernels = {"experts_implementation": "eager"} if "num_local_experts" in vars(config) else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **kernels)
    for parameter, value in model.named_parameters():
        if parameter.endswith("sinks"):  # which start at 0
            torch.nn.init.normal_(value)
    return model.to(dtype).eval()


def changed(model: Any, by: float = 0.02) -> Any:
    """Copy a model and move its parameters a little, as a draft model of it."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in other.parameters():
            value += by * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return other


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts of token ids, of 1 to ``longest`` tokens; the first is the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    lengths[0] = longest
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded_left(rows: list[list[int]]) -> torch.Tensor:
    """Pad prompts on the left: long [B, S]."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + row for row in rows])
