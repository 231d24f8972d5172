"""Tiny tokenizers and folders in published layouts, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def tiny_tokenizer(size: int = 64, extra: Sequence[str] = ()):
    """A fast tokenizer of words ``w0``, ``w1`` ... that begins texts with ``<s>``; ``extra``:
    further whole words, after the others."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "<unk>"]
    words += [f"w{i}" for i in range(size - len(words) - len(extra))] + list(extra)
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def save_quietly(thing, folder: Path, **kwargs) -> None:
    from gen.models.load.locate import quiet

    with quiet():
        thing.save_pretrained(folder, **kwargs)


def padded_left(rows: Sequence[Sequence[int]], pad: int) -> dict[str, torch.Tensor]:
    """Prompts as transformers takes them: ids and attention mask [B, P], moved to the right."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(r)) + list(r) for r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }
