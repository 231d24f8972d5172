"""Bytes of the tokens of a model of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gen.core.errors import GenError


@dataclass(frozen=True)
class Vocabulary:
    """Bytes that token ids stand for in a decoded text.

    A text is the bytes of its first token, then those of the others. Decoders that write a space
    before every word leave it out before the first one.

    Attributes:
        first: bytes of every token id where it is the first token of a text, [V]; None for tokens
            that are no text: special tokens, and ids that the tokenizer does not have.
        later: bytes of every token id after other tokens, [V].
    """

    first: tuple[bytes | None, ...]
    later: tuple[bytes | None, ...]

    def __len__(self) -> int:
        return len(self.later)

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a text.

        Raises:
            GenError: a token is no text.
        """
        parts = [self.first[i] for i in ids[:1]] + [self.later[i] for i in ids[1:]]
        for token, part in zip(ids, parts, strict=True):
            if part is None:
                raise GenError(f"token {token} is special; expected tokens of text")
        return b"".join(part for part in parts if part)
