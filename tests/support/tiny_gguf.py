"""Write a tiny language model as a GGUF file, as the converters of llama.cpp do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

# bytes that the prompts of tests have, as byte-level BPE spells them; Ġ is a space
ALPHABET = "Ġabcdefghijklmnopqrstuvwxyz0123456789.,?!"
SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2: those of tiny_checkpoints.SHAPE
MERGES = ("Ġ w", "h e", "Ġ he", "a b", "r e", "o n", "Ġw 1")


def vocabulary(size: int) -> list[str]:
    words = [*SPECIAL, *ALPHABET, *("".join(m.split()) for m in MERGES)]
    return words + [f"<unused{n}>" for n in range(size - len(words))]


def write(
    model,
    file: Path,
    quantized: bool = False,
    arch: str | None = None,
    scaling: str | None = None,
    parts: int | None = None,
    fields: Mapping[str, str | float | int] | None = None,
    **extra,
) -> Path:
    """Write a Llama or Qwen3 of transformers.

    Args:
        quantized: store matrices in Q8_0, whose blocks of 32 numbers share a float16 scale.
        arch: architecture that the file claims, by default the model's.
        scaling: scaling of rotations that the file claims.
        parts: number of files that the file claims to be one of.
        fields: further metadata by key.
        extra: further tensors by name, with __ for a dot.
    """
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(str(file), arch or kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    if scaling is not None:
        writer.add_string(f"{kind}.rope.scaling.type", scaling)
    if parts is not None:
        writer.add_uint16("split.count", parts)
    for key, value in (fields or {}).items():
        adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        adds[type(value)](key, value)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == kind), config.num_hidden_layers
    )
    for key, value in model.state_dict().items():
        stem, _, ending = key.rpartition(".")
        weight = value.detach().float().numpy()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, config.head_dim)
        add(writer, f"{names.get_name(stem)}.{ending}", weight, quantized and weight.ndim > 1)
    for key, value in extra.items():
        add(writer, key.replace("__", "."), np.asarray(value, np.float32), False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_gpt2(model, file: Path, output: torch.Tensor | None = None) -> Path:
    """Write a GPT-2 of transformers; ``output``: a table of its own for the logits."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for key, value in model.transformer.state_dict().items():
        stem, _, ending = key.rpartition(".")
        is_flipped = value.dim() > 1 and ".h." in f".{key}"  # Conv1D has inputs first
        weight = (value.T if is_flipped else value).contiguous().float().numpy()
        add(writer, f"{names.get_name('transformer.' + stem)}.{ending}", weight, False)
    if output is not None:
        add(writer, "output.weight", output.float().numpy(), False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    words = vocabulary(size)
    unused = len(SPECIAL) + len(ALPHABET) + len(MERGES)
    kinds = [3 if n < len(SPECIAL) else 1 if n < unused else 5 for n in range(len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def add(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, quantized: bool) -> None:
    if quantized:
        blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, weight)


def interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a projection in llama.cpp's order: it rotates neighbours, transformers halves."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Numbers of a matrix after Q8_0."""
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(weight.detach().float().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))
