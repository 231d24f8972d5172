"""Texts of the tokens whose log-probabilities a call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return [_row(row, text) for row in logprobs]


def _row(row: ItemLogprobs, text: Callable[[int, bool], tuple[str, bytes | None]]) -> ItemLogprobs:
    """Return an item's log-probabilities with texts. The first token that is text is written
    without a space before it, unless text was given."""
    is_first, made = True, []
    for token in row:
        if token is not None:
            said, raw = text(token.token_id, is_first)
            tops = [text(token_id, is_first) for token_id, _ in token.top]
            token = replace(
                token,
                text=said,
                top_texts=tuple(t for t, _ in tops),
                text_bytes=raw,
                top_bytes=tuple(b for _, b in tops),
            )
            is_first = is_first and raw is None
        else:
            is_first = False
        made.append(token)
    return made
