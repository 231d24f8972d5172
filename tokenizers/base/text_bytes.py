"""Base class of text tokenizers: a signal is the UTF-8 of a text, padded with zeros, and tokens
have no codebook vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError


class TextBytes(TokenFrontend):
    """Text frontend over UTF-8 bytes.

    Attributes:
        device: device of signals and token ids.
        tokenizer: tokenizer of transformers.
        rewrites_spaces: later tokens may change spaces of the text before them.
    """

    device: torch.device
    tokenizer: Any
    rewrites_spaces: bool = False

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        raise NotImplementedError

    def _bytes(self, text: str) -> Tensor:
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)

    def postprocess(self, x: Tensor) -> str:
        """Decode UTF-8 uint8 [bytes] to a text. Raises ``GenError`` for another shape or dtype."""
        if x.dtype != torch.uint8 or x.ndim != 1:
            raise GenError(
                f"the signal is {x.dtype} {tuple(x.shape)}; expected uint8 [bytes], the UTF-8 of"
                " one text"
            )
        return bytes(x.tolist()).rstrip(b"\0").decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """Decode one token by itself; bytes of a part of a character become U+FFFD, and special
        tokens are spelt as in the vocabulary."""
        return self.tokenizer.decode([token]) if token < len(self.tokenizer) else ""

    @property
    def codebooks(self) -> list[Tensor]:
        """Return no codebook: tokens stand for words or parts of words."""
        return []
