"""Automata over bytes are the sets of words that their operations say, and as small as can be."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from gen.constraints.budget import Budget, BudgetExceeded, Limits
from gen.constraints.byte_dfa import (
    ByteDFA,
    any_of,
    anything,
    complement,
    concat,
    difference,
    empty,
    equal,
    intersect,
    literal,
    nothing,
    one_of,
    union,
)
from gen.core.errors import GenError

LONGEST = 4
WORDS = [bytes(w) for n in range(LONGEST + 1) for w in product(b"abc", repeat=n)]
Language = frozenset[bytes]


def accepted(dfa: ByteDFA) -> Language:
    return frozenset(word for word in WORDS if dfa.accepts(word))


def joined(first: Language, second: Language) -> Language:
    return frozenset(a + b for a in first for b in second if len(a + b) <= LONGEST)


def repeated(language: Language, least: int, most: int) -> Language:
    found, power = frozenset(), frozenset({b""})
    for n in range(most + 1):
        found |= power if n >= least else frozenset()
        power = joined(power, language)
    return found


def twins(dfa: ByteDFA) -> set[tuple[int, int]]:
    """Return the pairs of states that no text tells apart, by filling a table."""
    rows = [[*row, -1] for row in dfa.next.tolist()] + [[-1] * (dfa.next.shape[1] + 1)]
    ends = [*dfa.accepting.tolist(), False]  # the last state, -1, is the one after a wrong byte
    pairs = {(a, b) for b in range(-1, dfa.num_states) for a in range(-1, b) if ends[a] == ends[b]}
    while True:
        kept = {
            (a, b)
            for a, b in pairs
            if all(
                s == t or (min(s, t), max(s, t)) in pairs
                for s, t in zip(rows[a], rows[b], strict=True)
            )
        }
        if kept == pairs:
            return kept
        pairs = kept


def random_language(draw: random.Random) -> tuple[ByteDFA, Language]:
    words = [bytes(draw.choices(b"abc", k=draw.randint(0, 3))) for _ in range(draw.randint(1, 4))]
    return any_of(words), frozenset(words)


@pytest.mark.parametrize("seed", range(30))
def test_operations_are_those_of_sets(seed):
    draw = random.Random(seed)
    (a, in_a), (b, in_b) = random_language(draw), random_language(draw)
    least = draw.randint(0, 2)
    most = least + draw.randint(0, 2)
    everything, every = frozenset(WORDS), one_of(b"abc").star()
    cases = {
        "union": (union(a, b), in_a | in_b),
        "concat": (concat(a, b), joined(in_a, in_b)),
        "intersect": (intersect(a, b), in_a & in_b),
        "difference": (difference(a, b), in_a - in_b),
        "complement": (intersect(every, complement(a)), everything - in_a),
        "repeat": (a.repeat(least, most), repeated(in_a, least, most)),
        "star": (a.star(), repeated(in_a, 0, LONGEST)),
        "plus": (a.plus(), repeated(in_a, 1, LONGEST)),
        "optional": (a.optional(), in_a | {b""}),
        "both": (difference(concat(a, b).star(), a.plus()), None),
    }
    for name, (dfa, wanted) in cases.items():
        if wanted is not None:
            assert accepted(dfa) == wanted, name
        assert not twins(dfa) or dfa.is_empty, name
        assert set(dfa.next.flat) | {0, -1} == {*range(-1, dfa.num_states)}, name
        if accepted(dfa):
            shortest = min(accepted(dfa), key=lambda w: (len(w), w))
            assert dfa.shortest() == shortest, name


def test_equal_languages_have_equal_tables():
    a, b = literal(b"ab"), literal(b"b")
    pairs = [
        (concat(a, b.star()), union(a, concat(a, b.plus()))),
        (complement(complement(a)), a),
        (empty().star(), empty()),
        (nothing().star(), empty()),
        (a.repeat(0, 0), empty()),
        (difference(a, a), nothing()),
        (one_of(b""), nothing()),
        (concat(anything(), nothing()), nothing()),
        (one_of(range(256)).star(), anything()),
    ]
    for first, second in pairs:
        assert equal(first, second)
        for mine, other in zip(vars(first).values(), vars(second).values(), strict=True):
            assert np.array_equal(mine, other)
    assert not equal(a, b)  # control
    assert not equal(a, a.optional())


def test_twins_would_be_found():
    """Control: an automaton with a state too many has a pair that no text tells apart."""
    classes = np.zeros(256, np.uint8)
    large = ByteDFA(np.array([[1], [0]], np.int32), np.ones(2, bool), classes)
    assert twins(large) == {(0, 1)} and not twins(large.minimize())


def test_useless_states_are_dropped():
    table = np.array([[1, 2], [1, 1], [-1, 3], [-1, -1], [0, 0]], np.int32)
    classes = np.zeros(256, np.uint8)
    classes[ord("b")] = 1
    dfa = ByteDFA(table, np.array([False, False, False, True, True]), classes).minimize()
    assert dfa.num_states == 3 and dfa.accepts(b"bb") and not dfa.accepts(b"a")


def test_long_automata_are_minimal():
    assert literal(b"ab" * 500).num_states == 1001
    assert one_of(b"ab").repeat(0, 500).num_states == 501
    words = [b"%05d" % (7 * i) for i in range(1000)]
    assert any_of(words).num_states < 400
    tail = concat(one_of(b"ab").star(), literal(b"a"), one_of(b"ab").repeat(9, 9))
    assert tail.num_states == 2**10


def test_too_many_states_are_refused():
    tail = [one_of(b"ab").star(), literal(b"a"), one_of(b"ab").repeat(9, 9)]
    for make in (
        lambda: concat(*tail),
        lambda: literal(b"a" * 600),
        lambda: one_of(b"a").repeat(600, None),
        lambda: intersect(
            one_of(b"a").repeat(23, 23).star(),
            one_of(b"a").repeat(29, 29).star(),
        ),
    ):
        with Budget(Limits(states=500)), pytest.raises(BudgetExceeded, match="than 500 states"):
            make()
        assert make().num_states > 0  # control
    assert concat(*tail[:2]).num_states == 2  # control


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2)])
def test_repetitions_are_ranges(bounds):
    with pytest.raises(GenError, match="repeat"):
        literal(b"a").repeat(*bounds)


def test_nothing_has_no_shortest_text():
    with pytest.raises(GenError, match="empty"):
        nothing().shortest()
