"""Tokenizers that are trained on texts of one's own: byte-level BPE, which has tokens for every
text in unicode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch

from gen.core.errors import GenError
from gen.core.files import put
from gen.models.load.libraries import transformers
from gen.models.load.pretrained import tokenizer_of
from gen.tokenizers.text.hf_text import HFText

# the installed package; the room of the same name is gen.tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

FILE = "tokenizer.json"
END = "<|endoftext|>"  # stands before a prompt and ends a text, as in GPT-2
LEAST = 257  # tokens of the smallest vocabulary: all bytes, and ``END``
OFTEN = 2  # occurrences of a pair that becomes a token


class TrainedTokenizer:
    """Tokenizer of captions or of texts, in one file ``tokenizer.json``.

    Attributes:
        inner: tokenizer of the package ``tokenizers``.
    """

    def __init__(self, inner: Tokenizer):
        inner.no_padding()
        inner.no_truncation()
        self.inner = inner

    @classmethod
    def of_captions(cls, captions: Iterable[str], vocab_size: int) -> Self:
        """Train a tokenizer of captions, which it compares as CLIP's does: in NFC and lower case,
        with single spaces.

        Args:
            captions: captions.
            vocab_size: most tokens of the vocabulary, at least ``LEAST``.
        """
        inner = _byte_level(prefix_space=True)
        inner.normalizer = normalizers.Sequence(
            [
                normalizers.NFC(),
                normalizers.Lowercase(),
                normalizers.Replace(Regex(r"\s+"), " "),
                normalizers.Strip(),
            ]
        )
        inner.train_from_iterator(captions, _trainer(vocab_size))
        return cls(inner)

    @classmethod
    def of_texts(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train a tokenizer whose tokens decode to the very text; arguments of ``of_captions``."""
        inner = _byte_level(prefix_space=False)
        inner.train_from_iterator(texts, _trainer(vocab_size, [END]))
        return cls(inner)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Load the tokenizer of a folder with ``tokenizer.json``, or of a published model.

        Raises:
            GenError: there is none.
        """
        path = Path(folder) / FILE
        if path.is_file():
            try:
                return cls(Tokenizer.from_file(str(path)))
            except Exception as error:  # the library raises bare Exceptions
                raise GenError(f"the tokenizer {path} cannot be read: {error}") from None
        wrapped = tokenizer_of(folder)
        if not wrapped.is_fast:
            raise GenError(
                f"the tokenizer of {folder} is a {type(wrapped).__name__}; expected one with a"
                f" {FILE}"
            )
        return cls(Tokenizer.from_str(wrapped.backend_tokenizer.to_str()))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` into a folder, whole or not at all."""
        put(folder / FILE, lambda temporary: temporary.write_text(self.inner.to_str(), "utf-8"))

    @property
    def size(self) -> int:
        """Number of token ids."""
        return 1 + max(self.inner.get_vocab().values())

    @property
    def digest(self) -> str:
        """Digest of vocabulary and rules."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()[:16]

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def frontend(self, device: torch.device | str = "cpu") -> HFText:
        """Return the frontend of texts that begin and end with ``END``, which the tokenizer gets if
        it lacks it."""
        end = AddedToken(END, special=True, normalized=False)
        self.inner.add_special_tokens([end])
        begin = (END, self.inner.token_to_id(END))
        self.inner.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[begin]
        )
        made = transformers().PreTrainedTokenizerFast(
            tokenizer_object=self.inner,
            bos_token=end,
            eos_token=end,
            clean_up_tokenization_spaces=False,
        )
        return HFText(made, device=device)


def _byte_level(prefix_space: bool) -> Tokenizer:
    """Return an untrained tokenizer; ``prefix_space``: the first word is one like any other."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    inner.decoder = decoders.ByteLevel()
    return inner


def _trainer(vocab_size: int, special: Iterable[str] = ()) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=OFTEN,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
