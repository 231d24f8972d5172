"""Tiny random folders of language models whose tokenizer has a token for every byte. Not a test."""

from __future__ import annotations

from pathlib import Path

import masked_folders
import torch

END, MASK, VOCAB = 256, 257, 264


def byte_tokenizer():
    """Tokenizer of bytes, with an end token and a mask token."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: n for n, letter in enumerate(alphabet)}
    vocab |= {"<|endoftext|>": END, "<|mask|>": MASK}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", mask_token="<|mask|>"
    )


def causal(folder: Path, seed: int = 0) -> Path:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        initializer_range=0.4, eos_token_id=END, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def masked(folder: Path, seed: int = 0) -> Path:
    """A random Dream."""
    config = masked_folders.DREAM | {
        "vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": END, "bos_token_id": END,
        "pad_token_id": END, "max_position_embeddings": 1024,
    }  # fmt: skip
    masked_folders.write(folder, config, masked_folders.dream(config, seed))
    byte_tokenizer().save_pretrained(folder)
    return folder
