"""Texts of the tokens whose log-probabilities a call returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from gen.contracts.frontend import TokenFrontend
from gen.core.logprobs import ItemLogprobs
from gen.tokenizers.base.text_bytes import TextBytes


def with_texts(
    logprobs: Sequence[ItemLogprobs] | None, frontend: TokenFrontend
) -> list[ItemLogprobs] | None:
    """Return log-probabilities with the texts of their tokens, where a text frontend has them."""
    if logprobs is None or not isinstance(frontend, TextBytes):
        return None if logprobs is None else list(logprobs)
    text = cache(frontend.token_text)
    return [
        [
            token
            and replace(
                token,
                text=text(token.token_id),
                top_texts=tuple(text(token_id) for token_id, _ in token.top),
            )
            for token in row
        ]
        for row in logprobs
    ]
