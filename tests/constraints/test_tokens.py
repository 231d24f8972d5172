"""Automata over tokens accept the sequences whose bytes are a text, and eos tokens after it."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from gen.constraints.budget import Budget, BudgetExceeded, Limits
from gen.constraints.byte_dfa import FAR, concat, literal, one_of
from gen.constraints.regex import regex
from gen.constraints.tokens import over_tokens, require_room, trimmed, with_eos, within
from gen.contracts.constraint import Automaton
from gen.core.errors import GenError

V = 7
PATTERNS = ["(ab|c)*a?", "a{2,4}b*", "[abc]{3}", "(a|bc)+", "((ab)*c)?a", "[^a]*a.*"]
SEQUENCES = [ids for n in range(5) for ids in product(range(V), repeat=n)]


def accepts(automaton: Automaton, ids: tuple[int, ...]) -> bool:
    state = 0
    for token in ids:
        state = automaton.step(state, token)
    return state >= 0 and bool(automaton.accepting[state])


def vocabulary(draw: random.Random) -> list[bytes | None]:
    words = [bytes(draw.choices(b"abc", k=draw.randint(1, 3))) for _ in range(V)]
    return [draw.choice([word, word, word, word, None, b""]) for word in words]


@pytest.mark.parametrize("seed", range(30))
def test_sequences_of_tokens_are_accepted_for_their_bytes(seed):
    draw = random.Random(seed)
    tokens = vocabulary(draw)
    first = [t and t[draw.randint(0, 1) :] for t in tokens] if seed % 2 else None
    language = regex(draw.choice(PATTERNS))

    def wanted(ids: tuple[int, ...]) -> bool:
        parts = [(first or tokens)[t] for t in ids[:1]] + [tokens[t] for t in ids[1:]]
        is_text = all(p or (p == b"" and first and not i) for i, p in enumerate(parts))
        return is_text and language.accepts(b"".join(p for p in parts if p))

    accepted = [ids for ids in SEQUENCES if wanted(ids)]
    if not accepted:
        return  # the next test has languages that cannot be spelt
    automaton = over_tokens(language, tokens, first)
    assert [ids for ids in SEQUENCES if accepts(automaton, ids)] == accepted
    states, classes = automaton.next.shape
    assert (automaton.distance[:-1] < FAR).all()  # no dead ends
    assert (automaton.next >= 0).any(0).all()
    assert len(np.unique(automaton.next, axis=1).T) == classes
    assert set(np.unique(automaton.next)) | {0} >= set(range(states))


def test_a_language_that_no_token_spells_is_refused():
    for tokens in ([b"b", None, b""], [], [b"aab"]):
        with pytest.raises(GenError, match="no text that this vocabulary can spell"):
            over_tokens(literal(b"aa"), tokens)
    assert accepts(over_tokens(literal(b"aa"), [b"a"]), (0, 0))  # control


def test_a_constraint_that_needs_too_much_memory_is_refused():
    language = one_of(b"a").repeat(0, 199)
    with Budget(Limits(megabytes=0.001)), pytest.raises(BudgetExceeded, match="0.001 MB"):
        over_tokens(language, [b"a", b"aa"])
    with Budget(Limits(megabytes=1)):  # control
        assert over_tokens(language, [b"a", b"aa"]).next.shape == (200, 2)


def test_eos_tokens_come_after_a_text_and_nothing_after_them():
    language = regex("a{1,2}b?")
    text = over_tokens(language, [b"a", b"b", None, None, b"b"])
    ended = with_eos(text, [2, 3])
    for ids in (i for n in range(5) for i in product(range(5), repeat=n)):
        words = "".join("ab__b"[t] for t in ids)
        spelt = words.rstrip("_")
        assert accepts(ended, ids) == ("_" not in spelt and language.accepts(spelt.encode()))
    # an eos token is no text any more
    assert not accepts(with_eos(text, [1]), (0, 1, 0))
    assert accepts(with_eos(text, [1]), (0, 1, 1)) and not accepts(text, (0, 1, 1))
    with pytest.raises(GenError, match="eos_token_ids is 5; expected ids below 5"):
        with_eos(text, [5])


def test_a_text_fits_the_positions():
    automaton = over_tokens(concat(literal(b"aaaa"), one_of(b"a").star()), [b"a", b"aaa"])
    require_room(automaton, 2)
    with pytest.raises(GenError, match="has 2 tokens and there are 1 positions"):
        require_room(automaton, 1)
    slow = within(automaton, np.array([True, False]))
    with pytest.raises(GenError, match="has 4 tokens and there are 3 positions"):
        require_room(slow, 3)


def test_an_automaton_without_texts_is_refused():
    table = np.array([[1], [1]], np.int32)
    with pytest.raises(GenError, match="accepts no text"):
        trimmed(Automaton(table, np.array([False, False]), np.zeros(3, np.int32)))
