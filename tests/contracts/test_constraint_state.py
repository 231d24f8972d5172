"""Constraints with a state per row, and blocks of a token space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gen.contracts.constraint import (
    FAR,
    Automaton,
    AutomatonConstraint,
    pack_bools,
)
from gen.contracts.row_constraint import RowConstraint, unpack_bitmask
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace

V, T = 70, 6


def counter(states: int = 4, seed: int = 0, wrong: float = 0.2) -> Automaton:
    """Make a random automaton over V tokens of 5 classes; a share ``wrong`` of steps is none."""
    rng = np.random.default_rng(seed)
    following = rng.integers(0, states, (states, 5)).astype(np.int32)
    following[rng.random(following.shape) < wrong] = -1
    accepting = rng.random(states) < 0.4
    accepting[0] = False
    return Automaton(following, accepting, rng.integers(0, 5, V).astype(np.int32))


def completable(automaton: Automaton, state: int, positions: int) -> bool:
    """Return True if a text of at most so many tokens leads to an accepting state."""
    if state < 0:
        return False
    reached = {state}
    for _ in range(positions + 1):
        if any(automaton.accepting[s] for s in reached):
            return True
        reached = {int(t) for s in reached for t in automaton.next[s] if t >= 0}
    return False


def test_drafts_after_which_a_text_gets_too_long_are_followed_by_anything():
    """Two tokens: class 0 leads to the end in one more, class 1 in two more."""
    following = np.array([[1, 2], [3, -1], [1, -1], [-1, -1]], dtype=np.int32)
    automaton = Automaton(
        following, np.array([False, False, False, True]), np.arange(2, dtype=np.int32)
    )
    rows = RowConstraint(AutomatonConstraint(automaton), 2)
    drafts = torch.tensor([[0, 0], [1, 0]])
    found = rows.legal(drafts, torch.tensor([[0, 1], [0, 1]]))
    assert found.tolist() == [[[True, False], [True, False]], [[True, False], [True, True]]]
    # the state is where it was, for the draft that comes instead
    assert rows.legal(torch.tensor([[0, 0]]), torch.tensor([[1]])).tolist() == [[[True, False]]]
    # a text that is complete and may not go on is no draft's fault: the space says so
    ended = Automaton(following, np.array([False, True, False, False]), automaton.token_class)
    dead = RowConstraint(AutomatonConstraint(ended), 3)
    assert not bool(dead.legal(torch.tensor([[0, 0, 0]]), torch.tensor([[1]])).any())


def test_a_bitmask_is_the_dense_mask():
    legal = np.random.default_rng(0).random(V) < 0.5
    legal[31], legal[63] = True, True
    packed = torch.from_numpy(pack_bools(legal))[None]
    assert packed.dtype == torch.int32 and packed.shape == (1, 3)
    assert unpack_bitmask(packed, V)[0].tolist() == legal.tolist()
    assert int(packed[0, 0]) < 0  # the sign is bit 31
    assert unpack_bitmask(packed ^ 1, V)[0].tolist() != legal.tolist()  # control: one bit matters


@pytest.mark.parametrize("seed", range(20))
def test_an_automaton_offers_what_can_still_be_completed(seed):
    automaton = counter(seed=seed)
    for state in range(len(automaton.next)):
        for remaining in (1, 2, T):
            wanted = [
                completable(automaton, automaton.step(state, token), remaining - 1)
                for token in range(V)
            ]
            assert automaton.allowed(state, remaining).tolist() == wanted
    assert automaton.distance[-1] == FAR


def test_a_state_follows_any_text_by_advancing_and_rolling_back():
    automaton, generator = counter(seed=3, wrong=0.05), torch.Generator().manual_seed(1)
    rule = RowConstraint(AutomatonConstraint(automaton), T)
    sizes = set()
    for _ in range(60):
        history = torch.randint(V, (3, T), generator=generator)
        history[1] = history[0]  # a row that became another's text
        positions = torch.randint(T, (3, 2), generator=generator)
        fresh = RowConstraint(AutomatonConstraint(automaton), T).legal(history, positions)
        legal = rule.legal(history, positions)
        assert torch.equal(legal, fresh)
        for row in range(3):
            for column, position in enumerate(positions[row].tolist()):
                state = 0
                for n, token in enumerate(history[row, :position].tolist()):
                    could_come = state >= 0 and automaton.allowed(state, T - n)[token]
                    state = automaton.step(state, token)
                wanted = [True] * V  # after a token that may not come
                if state >= 0:
                    wanted = automaton.allowed(state, T - position).tolist()
                    if position and not any(wanted) and not could_come:
                        wanted = [True] * V  # after one with which the text gets too long
                assert legal[row, column].tolist() == wanted
                sizes.add(sum(wanted))
    assert len(sizes) > 3


def test_a_state_rolls_back_no_more_tokens_than_it_has():
    state = AutomatonConstraint(counter()).start()
    with pytest.raises(GenError, match="expected 0 to 0"):
        state.rollback(1)


def test_unequal_blocks_cover_the_grid_in_order():
    space = TokenSpace.codes((21,), 8, 8)
    scales = (slice(0, 1), slice(1, 5), slice(5, 21))
    assert replace(space, blocks=scales).blocks == scales
    assert replace(space, blocks=scales).suffix(3).blocks == (slice(0, 2), slice(2, 18))
    for wrong in (scales[:2], scales[1:], (*scales, slice(21, 21)), (scales[0], slice(2, 21))):
        with pytest.raises(GenError, match="block"):
            replace(space, blocks=wrong)
