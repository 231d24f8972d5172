"""Log-probabilities of decoded tokens.

They belong to the distribution of the target with guidance, penalties and allowed tokens, before
temperature and filters (top-k, top-p, min-p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one decoded token.

    Attributes:
        token_id: the token.
        logprob: its log-probability; -inf where an approximate sampler took an impossible token.
        top: the most probable tokens of the position with their log-probabilities, the first one
            first. Impossible tokens are left out.
        text: text of the token, where a text frontend decodes it. A part of a character is spelt
            ``bytes:\\xf0\\x9f``, and an id without a token ``token_id:7``.
        top_texts: texts of ``top``, where a text frontend decodes them.
        text_bytes: bytes that the token writes into the text; None for special tokens, and where
            nobody knows.
        top_bytes: bytes of ``top``.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str | None = None
    top_texts: tuple[str, ...] | None = None
    text_bytes: bytes | None = None
    top_bytes: tuple[bytes | None, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which JSON can hold: log-probabilities have six decimals, and null
        stands for -inf."""
        top: list[dict[str, Any]] = [{"token_id": i, "logprob": _plain(x)} for i, x in self.top]
        for entry, text in zip(top, self.top_texts or (), strict=False):
            entry["text"] = text
        said = {} if self.text is None else {"text": self.text}
        return {"token_id": self.token_id, "logprob": _plain(self.logprob), **said, "top": top}


# log-probabilities of an item's tokens; None for tokens that were given
ItemLogprobs = list[TokenLogprob | None]


def as_dicts(logprobs: ItemLogprobs) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of an item as plain data."""
    return [None if token is None else token.to_dict() for token in logprobs]


def _plain(x: float) -> float | None:
    return round(x, 6) if math.isfinite(x) else None
