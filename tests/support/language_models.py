"""Tiny random causal language models of ten architectures, whose tokenizer has a token for every
byte. Not a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from gen.models.load.locate import quiet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS, TURN = range(4)
NAMES = ["<pad>", "<s>", "</s>", "<turn>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
CHAT = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"
SMALL = dict(
    vocab_size=len(NAMES) + 4, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.2, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
WINDOW, UNTIED = dict(sliding_window=128), dict(tie_word_embeddings=False)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, **UNTIED}),
    "cohere2": ("Cohere2", {**WINDOW, **UNTIED}),
    "gpt_oss": ("GptOss", {**WINDOW, "head_dim": 16, "num_local_experts": 4}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", UNTIED),
    "smollm3": ("SmolLM3", {}),
}


def byte_tokenizer(template: str | None = None) -> Any:
    """Tokenizer of bytes with four special tokens, which begins texts with ``<s>``."""
    inner = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(NAMES)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<turn>"],
    )  # fmt: skip
    if template:
        tokenizer.chat_template = template
    return tokenizer


def save(folder: Path, name: str = "llama", seed: int = 0, template: str | None = None) -> Path:
    """Write a random model of an architecture and its tokenizer."""
    kind, own = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **own})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter, weight in model.named_parameters():
        if "norm" in parameter:  # all ones, Gemma repeats its last token for ever
            weight.data.normal_()
    with quiet():
        model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """Load the model of a folder with transformers."""
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def generate(model: Any, prompt: str, **settings: Any) -> list[int]:
    """Return the new tokens of ``generate`` for one prompt, greedy unless the settings draw."""
    ids = byte_tokenizer()(prompt, return_tensors="pt").input_ids
    with quiet():
        made = model.generate(ids, **{"pad_token_id": PAD, **settings})
    return made[0, ids.shape[1] :].tolist()


def states(folder: Path, file: str = "generation_config.json", **fields: Any) -> Path:
    """Change fields of a JSON file of a folder; None removes one."""
    path = folder / file
    said = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    return folder
