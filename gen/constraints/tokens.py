"""Automata over token ids: an automaton over bytes, read through a vocabulary.

Tokens whose bytes the automaton treats alike are one word of byte classes. A word is a function of
states: all states walk it at once, and prefixes of tokens that are the same function are walked on
together. A vocabulary of 32,768 tokens is often a few hundred functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gen.constraints.budget import check, require_bytes
from gen.constraints.byte_dfa import CELL, FAR, STEP, ByteDFA, distances, distinct_rows
from gen.contracts.constraint import Automaton
from gen.core.errors import GenError, bad_value

COLUMN = 12  # bytes of a state in a column of the walk, its key and the table


def over_tokens(
    dfa: ByteDFA,
    tokens: Sequence[bytes | None],
    first: Sequence[bytes | None] | None = None,
) -> Automaton:
    """Return the sequences of tokens whose bytes, joined, are a text of a language.

    Args:
        dfa: the language.
        tokens: bytes of every token, [V]; None or no bytes for tokens that may come nowhere.
        first: bytes of every token at the start of a text, [V], where they differ
            (``gen.contracts.frontend.Vocabulary``); a token may have none there.

    Returns:
        Automaton without useless states; tokens that it treats alike share a class.

    Raises:
        GenError: no text of the language can be spelt, or the automaton is too large.
    """
    if first is not None and b"" not in first and list(first) == list(tokens):
        first = None
    words, word_of = _words(dfa, tokens, least=1)
    table, column_of = _walk(dfa, words, np.arange(dfa.num_states))
    token_class = np.append(column_of, -1)[word_of]
    if first is not None:  # state 0 is the start of a text; the states of bytes come after it
        opening, opening_of = _words(dfa, first, least=0)
        begin, column_of = _walk(dfa, opening, np.zeros(1, np.int64))
        begin_class = np.append(column_of, -1)[opening_of]
        token_class, table = _joined(token_class, table, begin_class, begin[0])
        accepting = np.append(dfa.accepting[:1], dfa.accepting)
    else:
        accepting = dfa.accepting
    return trimmed(Automaton(table, accepting, token_class.astype(np.int32)))


def _words(
    dfa: ByteDFA, tokens: Sequence[bytes | None], least: int
) -> tuple[list[bytes], np.ndarray]:
    """Return the words of byte classes that tokens of at least so many bytes are, and the word of
    every token; -1 for none."""
    classes = dfa.byte_class.tobytes()
    index: dict[bytes, int] = {}
    word_of = np.full(len(tokens), -1, np.int64)
    for token, text in enumerate(tokens):
        if text is not None and len(text) >= least:
            word_of[token] = index.setdefault(text.translate(classes), len(index))
    return list(index), word_of


def _walk(dfa: ByteDFA, words: list[bytes], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states after every word, from each of some states.

    Words that lead from all of them to the same states are walked once from there on.

    Args:
        dfa: automaton with S states.
        words: words of byte classes.
        states: int [s].

    Returns:
        Distinct columns of states, int32 [s, n], -1 where a word may not come, and the column of
        every word, int [words]; -1 for words that may come nowhere.
    """
    dead = dfa.num_states
    step = np.full((dfa.next.shape[1], dead + 1), dead, np.int32)
    step[:, :-1] = np.where(dfa.next < 0, dead, dfa.next).T
    lengths = np.array([len(word) for word in words], np.int64)
    letters = np.frombuffer(b"".join(words), np.uint8)
    begin = lengths.cumsum() - lengths
    columns = [np.full(len(states), dead, np.int32), states.astype(np.int32)]
    index = {column.tobytes(): i for i, column in enumerate(columns)}
    after: dict[int, int] = {}  # column and byte class -> column
    column_of = np.zeros(len(words), np.int64)
    rows, node = np.arange(len(words)), np.ones(len(words), np.int64)
    depth = 0
    while len(rows):
        is_over = lengths[rows] == depth
        column_of[rows[is_over]] = node[is_over]
        rows, node = rows[~is_over], node[~is_over]
        pairs, which = np.unique(node * 256 + letters[begin[rows] + depth], return_inverse=True)
        for pair in pairs.tolist():
            if pair not in after:
                column = step[pair % 256][columns[pair // 256]]
                after[pair] = index.setdefault(column.tobytes(), len(columns))
                if after[pair] == len(columns):
                    columns.append(column)
                    require_bytes(len(columns) * len(states) * COLUMN)
                check()
        node = np.array([after[pair] for pair in pairs.tolist()], np.int64)[which.reshape(-1)]
        rows, node = rows[node > 0], node[node > 0]
        depth += 1
    used, number = np.unique(column_of, return_inverse=True)
    table = np.stack([columns[i] for i in used.tolist() or [0]], axis=1)
    number = np.where(column_of > 0, number.reshape(-1), -1)
    return np.where(table == dead, -1, table), number


def _joined(
    token_class: np.ndarray, table: np.ndarray, begin_class: np.ndarray, begin: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Put the start of a text in front of the states of bytes.

    Args:
        token_class: class of every token after others, [V].
        table: states after the classes, [S, n].
        begin_class: class of every token at the start, [V].
        begin: state after each of these classes, [m].

    Returns:
        Class of every token, [V], and the table [S + 1, K] with the start as state 0.
    """
    at_start = np.append(begin, -1)[begin_class]
    pairs, joined = np.unique(np.stack([token_class, at_start]), axis=1, return_inverse=True)
    later = np.hstack([table, np.full((len(table), 1), -1, np.int32)])[:, pairs[0]]
    rows = np.vstack([pairs[1][None], later])
    return joined.reshape(-1), np.where(rows < 0, -1, rows + 1).astype(np.int32)


def trimmed(automaton: Automaton) -> Automaton:
    """Return an automaton without states that no accepted text goes through.

    Tokens that it treats alike share a class.

    Raises:
        GenError: no text is accepted.
    """
    has_tokens = np.zeros(automaton.next.shape[1] + 1, bool)
    has_tokens[automaton.token_class] = True
    steps = np.count_nonzero(automaton.next >= 0)
    require_bytes(automaton.next.size * CELL + steps * STEP)
    table = np.where(has_tokens[:-1], automaton.next, -1)
    distance = distances(table, automaton.accepting, check)
    if distance[0] == FAR:
        raise GenError(
            "the constraint accepts no text that this vocabulary can spell; expected at least one"
        )
    table = np.where(np.append(distance < FAR, False)[table], table, -1)
    kept = reachable_states(table)
    number = np.full(len(table) + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    table = number[table[kept]]
    first, group, _ = distinct_rows(np.ascontiguousarray(table.T))
    columns = table[:, first]
    used = (columns >= 0).any(0)
    rank = np.where(used, used.cumsum() - 1, -1)
    token_class = np.append(rank[group], -1)[automaton.token_class]
    return Automaton(
        np.ascontiguousarray(columns[:, used]),
        automaton.accepting[kept],
        token_class.astype(np.int32),
    )


def with_eos(automaton: Automaton, eos_token_ids: Collection[int]) -> Automaton:
    """Return the texts of an automaton followed by any number of eos tokens.

    A text without any stays accepted: it may fill all positions that there are.

    Args:
        automaton: automaton of texts.
        eos_token_ids: tokens that end a text. None of them is text any more.

    Raises:
        GenError: an id is outside of the vocabulary.
    """
    for token in eos_token_ids:
        if not 0 <= token < automaton.vocab_size:
            raise bad_value("eos_token_ids", token, f"ids below {automaton.vocab_size}")
    states, classes = automaton.next.shape
    table = np.full((states + 1, classes + 1), -1, np.int32)
    table[:-1, :-1] = automaton.next
    table[:-1, -1] = np.where(automaton.accepting, states, -1)
    table[-1, -1] = states
    token_class = automaton.token_class.copy()
    token_class[list(eos_token_ids)] = classes
    return trimmed(Automaton(table, np.append(automaton.accepting, True), token_class))


def within(automaton: Automaton, legal: np.ndarray) -> Automaton:
    """Return the texts of an automaton that have allowed tokens alone. ``legal``: bool [V].

    Raises:
        GenError: no text is left.
    """
    token_class = np.where(legal, automaton.token_class, -1).astype(np.int32)
    return trimmed(Automaton(automaton.next, automaton.accepting, token_class))


def require_room(automaton: Automaton, positions: int) -> None:
    """Refuse a constraint whose shortest text has more tokens than there are positions.

    Raises:
        GenError: the shortest text is longer.
    """
    shortest = int(automaton.distance[0])
    if shortest > positions:
        raise GenError(
            f"the shortest text of the constraint has {shortest:,} tokens and there are"
            f" {positions:,} positions; expected a shorter text or more positions"
            " (max_new_tokens)"
        )


def reachable_states(table: np.ndarray) -> np.ndarray:
    """Return the states that state 0 leads to, 0 included, in order."""
    seen = np.zeros(len(table), bool)
    frontier = np.zeros(1, np.int64)
    while len(frontier):
        check()
        seen[frontier] = True
        after = np.unique(table[frontier])
        after = after[after >= 0]
        frontier = after[~seen[after]]
    return np.flatnonzero(seen)
