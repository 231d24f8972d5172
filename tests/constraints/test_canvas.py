"""Tokens that may stand at a position are those of some accepted filling, after any writes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from gen.constraints.canvas import CanvasTable, RowCanvas
from gen.contracts.constraint import Automaton
from gen.core.errors import GenError

V, T = 3, 5
ROWS = np.array(list(product(range(V), repeat=T)))


def random_automaton(draw: np.random.Generator) -> Automaton:
    states, classes = int(draw.integers(1, 13)), int(draw.integers(1, 5))
    table = draw.integers(0, states, (states, classes)).astype(np.int32)
    table[draw.random(table.shape) < 0.4] = -1
    token_class = draw.integers(-1, classes, V).astype(np.int32)
    return Automaton(table, draw.random(states) < 0.4, token_class)


def accepts(automaton: Automaton, row: np.ndarray) -> bool:
    state = 0
    for token in row.tolist():
        state = automaton.step(state, token)
    return state >= 0 and bool(automaton.accepting[state])


def rows_of(automaton: Automaton, legal: np.ndarray) -> np.ndarray:
    """Return all rows that are accepted and legal: [n, T]."""
    return ROWS[[accepts(automaton, row) for row in ROWS] & legal[range(T), ROWS].all(1)]


def offered(accepted: np.ndarray, tokens: np.ndarray, position: int) -> list[bool]:
    """Return the tokens at a position of the accepted rows that agree with the others."""
    agrees = (accepted == tokens) | (tokens < 0)
    agrees[:, position] = True
    return np.isin(np.arange(V), accepted[agrees.all(1), position]).tolist()


def check(row: RowCanvas, accepted: np.ndarray) -> None:
    tokens = row.tokens
    is_completable = ((accepted == tokens) | (tokens < 0)).all(1).any()
    assert row.is_completable == is_completable
    for position in range(T):
        wanted = offered(accepted, tokens, position)
        assert row.allowed(position).tolist() == wanted
        assert [row.fits(position, token) for token in range(V)] == wanted


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.thinned(3)
def test_what_is_offered_equals_enumeration_after_any_writes(seed):
    draw = np.random.default_rng(seed)
    automaton = random_automaton(draw)
    legal = draw.random((T, V)) < (0.8 if seed % 2 else 2)
    accepted = rows_of(automaton, legal)
    table = CanvasTable(automaton, legal)
    check(table.open, accepted)
    row, tokens = table.open.copy(), np.full(T, -1)
    for _ in range(3):
        positions = draw.choice(T, draw.integers(1, 3), replace=False)
        written = draw.integers(-1, V, len(positions))  # -1 masks again
        written[(written >= 0) & ~legal[positions, written]] = -1
        tokens[positions] = written
        kept = row.copy()
        before = kept.tokens.copy()
        row.write(positions, written)
        assert row.tokens.tolist() == tokens.tolist()
        check(row, accepted)
        check(table.row(tokens), accepted)
        assert kept.tokens.tolist() == before.tolist()
        check(kept, accepted)


@pytest.mark.parametrize("seed", range(60))
def test_positions_written_one_after_the_other_never_contradict(seed):
    draw = np.random.default_rng(seed)
    automaton = random_automaton(draw)
    legal = np.ones((T, V), bool)
    accepted = rows_of(automaton, legal)
    table = CanvasTable(automaton, legal)
    if not len(accepted):
        with pytest.raises(GenError, match="no text of exactly 5 tokens"):
            table.require_open()
        return
    table.require_open()
    row = table.open.copy()
    for position in draw.permutation(T):
        row.write(np.array([position]), draw.choice(np.flatnonzero(row.allowed(position))))
    assert accepts(automaton, row.tokens)


def test_positions_written_at_once_may_contradict():
    """Control: what is allowed at each position is not allowed together."""
    pairs = Automaton(
        np.array([[1, 2], [3, -1], [-1, 3], [-1, -1]], np.int32),
        np.array([False, False, False, True]),
        np.array([0, 1], np.int32),
    )
    table = CanvasTable(pairs, np.ones((2, 2), bool))
    row = table.open.copy()
    assert row.allowed(0).all() and row.allowed(1).all()
    row.write(np.arange(2), np.array([0, 1]))
    assert not row.is_completable
    row.write(np.array([1]), -1)
    assert row.is_completable and row.allowed(1).tolist() == [True, False]


def test_a_row_starts_after_its_prefix():
    turns = Automaton(
        np.array([[1, -1], [-1, 0]], np.int32), np.array([True, True]), np.array([0, 1], np.int32)
    )
    legal = np.ones((2, 2), bool)
    assert CanvasTable(turns, legal).open.allowed(0).tolist() == [True, False]
    assert CanvasTable(turns, legal, start=1).open.allowed(0).tolist() == [False, True]
