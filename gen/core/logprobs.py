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
        text: text of the token, where a text frontend decodes it.
        top_texts: texts of ``top``, where a text frontend decodes them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str | None = None
    top_texts: tuple[str, ...] | None = None

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
