"""Base class of text tokenizers: a signal is the UTF-8 of a text, padded with zeros, and tokens
have no codebook vectors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend, Vocabulary
from gen.core.errors import GenError
from gen.core.plain import require_text

BROKEN = "\ufffd"  # character of bytes that are none


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
        require_text("text", text)
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)

    def postprocess(self, x: Tensor) -> str:
        """Decode UTF-8 uint8 [bytes] to a text. Raises ``GenError`` for another shape or dtype."""
        if x.dtype != torch.uint8 or x.ndim != 1:
            raise GenError(
                f"the signal is {x.dtype} {tuple(x.shape)}; expected uint8 [bytes], the UTF-8 of"
                " one text"
            )
        return bytes(x.tolist()).rstrip(b"\0").decode("utf-8", "replace")

    @cached_property
    def written(self) -> Vocabulary | None:
        """Bytes of every token; None where the tokenizer does not say what its tokens write."""
        return self.vocabulary()

    def token_text(self, token: int, is_first: bool = False) -> tuple[str, bytes | None]:
        """Return the text of a token and the bytes that it writes.

        A part of a character is spelt ``bytes:\\xf0\\x9f``, a special token as in the vocabulary
        and an id without a token ``token_id:7``.

        Args:
            token: token id.
            is_first: whether it is the first one of its text, before which no space is written.

        Returns:
            The text, and bytes that are None for a token that is no text.
        """
        known = token < len(self.tokenizer)
        if self.written is None:
            text = self.tokenizer.decode([token]) if known else ""
            return text, None if BROKEN in text else text.encode()
        parts = self.written.first if is_first else self.written.later
        raw = parts[token] if token < len(parts) else None
        if raw is None:
            name = self.tokenizer.convert_ids_to_tokens(token) if known else None
            return f"token_id:{token}" if name is None else name, None
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    @property
    def codebooks(self) -> list[Tensor]:
        """Return no codebook: tokens stand for words or parts of words."""
        return []
