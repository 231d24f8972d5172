"""Kind ``trie``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gen.constraints.budget import require_bytes, require_states
from gen.constraints.byte_dfa import any_of
from gen.constraints.ids import read_texts, spellings
from gen.constraints.kind import ConstraintKind, Context, Language, TokenLanguage
from gen.contracts.constraint import Automaton
from gen.core.errors import GenError, bad_value
from gen.core.registry import register

FORMS = ("one", "chunks", "transitions")


@register("constraint", "trie")
@dataclass(frozen=True)
class Trie(ConstraintKind):
    """Sequences of a list, as texts or as token ids. ``form``: ``one`` of them, any number of them
    one after the other (``chunks``), or n-grams that every window of n tokens is one of
    (``transitions``)."""

    sequences: list[Any]
    form: str = "one"

    def language(self, context: Context) -> Language:
        if self.form not in FORMS:
            raise bad_value("structured.form", self.form, " or ".join(FORMS))
        texts, are_ids = read_texts("structured.trie", self.sequences, context, "trie")
        if self.form == "transitions":
            if not are_ids:
                raise GenError("structured.form is 'transitions'; expected lists of token ids")
            return transitions(self.sequences, context.vocab_size)
        language = any_of(texts)
        if self.form == "chunks":
            language = language.star()
        return TokenLanguage(language, spellings(context.vocab_size)) if are_ids else language


def transitions(ngrams: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Return the sequences whose windows of n tokens are all in a list.

    A sequence of fewer than n tokens is the start of one of the n-grams.

    Args:
        ngrams: sequences of n ids, n at least 1.
        vocab_size: V.

    Raises:
        GenError: the sequences have different lengths, or none, or the table is too large.
    """
    sizes = sorted({len(ngram) for ngram in ngrams})
    if len(sizes) != 1 or not sizes[0]:
        raise GenError(f"structured.trie has sequences of {sizes} ids; expected n-grams of one n")
    states: dict[tuple[int, ...], int] = {(): 0}
    for ngram in ngrams:
        for start in [ngram[:size] for size in range(1, len(ngram))] + [ngram[1:]]:
            states.setdefault(tuple(start), len(states))
        require_states(len(states))
    used = sorted({token for ngram in ngrams for token in ngram})
    require_bytes(len(states) * len(used) * 4)
    token_class = np.full(vocab_size, -1, np.int32)
    token_class[used] = np.arange(len(used))
    table = np.full((len(states), len(used)), -1, np.int32)
    for ngram in ngrams:
        for size, token in enumerate(ngram):
            grown = tuple(ngram[: size + 1])
            # after a whole n-gram its last n - 1 tokens count
            after = grown if size + 1 < len(ngram) else grown[1:]
            table[states[grown[:-1]], token_class[token]] = states[after]
    return Automaton(table, np.ones(len(states), bool), token_class)
