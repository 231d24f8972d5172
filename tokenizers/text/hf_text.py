"""Text through any tokenizer of transformers: subword tokens of variable length.

A signal is the UTF-8 of a text, padded with zeros. Tokenisation depends on the whole text, so the
tokens of a prefix need not be a prefix of the tokens: generation stays in token ids, and only a
finished sequence is decoded.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gen.constraints.vocabulary import decoded, huggingface_vocabulary, token_table
from gen.contracts.frontend import FrontendConfig, Vocabulary
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.pretrained import tokenizer_of
from gen.tokenizers.base.text_bytes import TextBytes


@register("tokenizer", "hf_text")
class HFText(TextBytes):
    """Text tokenizer: token ids int64 [B, 1, T] of texts uint8 [B, bytes].

    ``ends``: eos token ids; tokens after the first one are ignored. ``vocab_size``: vocabulary of
    the model, which may exceed that of the tokenizer; the surplus decodes to nothing.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int | None = None,
        ends: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
    ):
        """Wrap a tokenizer. Raises ``GenError`` if it has tokens that the model does not have."""
        self.tokenizer, self.device = tokenizer, torch.device(device)
        self.size = max((len(tokenizer), *(1 + i for i in tokenizer.get_vocab().values())))
        # not every tokenizer has the setting
        self.rewrites_spaces = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        vocab_size = vocab_size or self.size
        if self.size > vocab_size:
            raise GenError(
                f"the tokenizer has tokens up to {self.size - 1}; expected less than {vocab_size},"
                " the size of the model's vocabulary"
            )
        default_ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.ends = default_ends if ends is None else ends
        self.config = FrontendConfig("text", "ids", (vocab_size,), (1,))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load the tokenizer of a local folder. Raises ``GenError`` if there is none."""
        return cls(tokenizer_of(path), device=device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of the tokenizer."""
        self.tokenizer.save_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        """Decode token ids up to the first eos token, without special tokens but for the markers
        of calls."""
        stop = next((n for n, i in enumerate(ids) if i in self.ends), len(ids))
        return decoded(self.tokenizer, [i for i in ids[:stop] if i < self.size])

    def preprocess(self, media: Any) -> Tensor:
        """Convert a text to UTF-8, uint8 [bytes]. Raises ``GenError`` for anything else."""
        if not isinstance(media, str):
            raise GenError(f"the text is a {type(media).__name__}; expected a string")
        return self._bytes(media)

    def encode(self, x: Tensor) -> Tensor:
        """Encode texts uint8 [B, bytes], shorter ones padded with the eos token. Raises
        ``GenError`` if padding is needed and the tokenizer has no eos token."""
        rows = [self.ids(self.postprocess(signal)) for signal in x]
        width = max(map(len, rows))
        if not self.ends and any(len(r) < width for r in rows):
            raise GenError(
                "the texts have different lengths and the tokenizer has no eos token to pad them"
                " with; expected one text at a time"
            )
        return torch.tensor(
            [r + [self.ends[0] if self.ends else 0] * (width - len(r)) for r in rows],
            dtype=torch.long,
            device=self.device,
        )[:, None]

    def decode(self, codes: Tensor) -> Tensor:
        if codes.ndim != 3 or codes.shape[1] != 1:
            raise GenError(f"token ids have shape {tuple(codes.shape)}; expected [B, 1, T]")
        return torch.nn.utils.rnn.pad_sequence(
            [self._bytes(self.text(row)) for row in codes[:, 0].tolist()], batch_first=True
        )

    @property
    def fingerprint(self) -> Tensor:
        """Digest of the vocabulary as 32 numbers of 0 to 255, exact in every floating-point
        dtype."""
        text = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of every token; eos tokens are none.

        Raises:
            GenError: the tokenizer rewrites a decoded text, or has a decoder that is not known.
        """
        return huggingface_vocabulary(self.tokenizer, self.config.codebook_sizes[0], self.ends)

    @cached_property
    def written(self) -> Vocabulary | None:
        try:  # of one token alone, whatever the tokenizer makes of texts
            return token_table(self.tokenizer, self.config.codebook_sizes[0], self.ends)
        except GenError:
            return None

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        raise GenError(
            "the number of tokens of a text does not follow from its number of bytes; expected a"
            " call of encode"
        )
