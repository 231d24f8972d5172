"""The constraint contract: which tokens may follow which, with a state per row.

A grammar, a JSON schema or a length that must come out is a constraint. It starts a state for a
row; the state says which tokens may come next, advances by a token and rolls back. Masks are
packed, 32 tokens to an int32, as grammar engines make them.

Targets ask statelessly, with the tokens before each position: ``gen.contracts.row_constraint``
answers them. This module does without torch, so that processes which build automata start soon.

A constraint that is a deterministic automaton says so (``Constraint.automaton``). Masked models
need one: they ask what may stand between tokens, not only what may follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from gen.core.errors import GenError

BITS = 32
FAR = np.int32(2**30)  # distance to an accepting state that cannot be reached


@dataclass(frozen=True)
class Automaton:
    """Deterministic automaton over token ids. State 0 is the first.

    Attributes:
        next: state after a token of class k, int32 [S, K]; -1 where such a token may not come.
        accepting: states in which a text may be complete, bool [S].
        token_class: class of every token, int32 [V]; -1 for tokens that may come nowhere.
    """

    next: np.ndarray
    accepting: np.ndarray
    token_class: np.ndarray

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return len(self.token_class)

    @property
    def nbytes(self) -> int:
        """Memory of the tables in bytes."""
        tables = (self.next, self.accepting, self.token_class, self.distance)
        return sum(table.nbytes for table in tables)

    def step(self, state: int, token: int) -> int:
        """Return the state after a token; -1 where it may not come, or after state -1."""
        kind = int(self.token_class[token])
        return -1 if state < 0 or kind < 0 else int(self.next[state, kind])

    @cached_property
    def distance(self) -> np.ndarray:
        """Fewest tokens from each state to an accepting one, int32 [S]; ``FAR`` if there is none.

        The last entry, [S], is ``FAR`` as well: index -1 is the state after a wrong token.
        """
        return np.append(distances(self.next, self.accepting), FAR)

    def allowed(self, state: int, remaining: int) -> np.ndarray:
        """Find the tokens that may come next: bool [V].

        Args:
            state: state of the row, at least 0.
            remaining: positions that are left, the next one included. A token counts only if the
                text can be completed in the others.
        """
        classes = self.distance[self.next[state]] < remaining
        return np.append(classes, False)[self.token_class]


class ConstraintState(ABC):
    """State of a constraint for one row."""

    @abstractmethod
    def allowed_bitmask(self, remaining: int) -> np.ndarray:
        """Return the tokens that may come next: int32 [ceil(V / 32)].

        Bit j of word i stands for token 32 i + j.

        Args:
            remaining: positions that are left, the next one included. Engines that know how long a
                text must still become leave out tokens after which it cannot be completed.
        """

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Append a token; return False, and change nothing, where it may not come."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back.

        Raises:
            GenError: the row has fewer tokens.
        """


class Constraint(ABC):
    """Rule about which tokens may follow which (kind ``constraint``).

    Attributes:
        vocab_size: V.
    """

    vocab_size: int

    @abstractmethod
    def start(self) -> ConstraintState:
        """Return the state of a row without tokens."""

    def automaton(self) -> Automaton | None:
        """Return the constraint as a deterministic automaton; None where it is none."""
        return None

    @property
    def nbytes(self) -> int:
        """Memory of the constraint in bytes, about."""
        automaton = self.automaton()
        return 0 if automaton is None else automaton.nbytes


class AutomatonConstraint(Constraint):
    """An automaton as a constraint."""

    def __init__(self, automaton: Automaton):
        self._automaton, self.vocab_size = automaton, automaton.vocab_size

    def start(self) -> ConstraintState:
        return AutomatonState(self._automaton)

    def automaton(self) -> Automaton:
        return self._automaton


class AutomatonState(ConstraintState):
    """States that a row of an automaton went through."""

    def __init__(self, automaton: Automaton):
        self.automaton, self.states = automaton, [0]

    def allowed_bitmask(self, remaining: int) -> np.ndarray:
        return pack_bools(self.automaton.allowed(self.states[-1], remaining))

    def advance(self, token: int) -> bool:
        state = self.automaton.step(self.states[-1], token)
        if state >= 0:
            self.states.append(state)
        return state >= 0

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.states):
            raise GenError(
                f"count is {count}; expected 0 to {len(self.states) - 1}, the tokens of the row"
            )
        del self.states[len(self.states) - count :]


def pack_bools(allowed: np.ndarray) -> np.ndarray:
    """Return allowed tokens, bool [V], as int32 [ceil(V / 32)]."""
    words = ceil(len(allowed) / BITS)
    packed = np.packbits(allowed, bitorder="little")
    return np.pad(packed, (0, words * BITS // 8 - len(packed))).view("<i4")


def distances(
    table: np.ndarray, accepting: np.ndarray, check: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Return the fewest steps from each state to an accepting one, int32 [S]; ``FAR`` for none.

    Args:
        table: state after each class of letters, int [S, K]; -1 for none.
        accepting: accepting states, bool [S].
        check: called once per distance; an error that it raises ends the search.
    """
    begin, sources = steps_back(table)
    found = np.full(len(table), FAR, np.int32)
    level, frontier = 0, np.flatnonzero(accepting)
    while len(frontier):
        check()
        found[frontier] = level
        before = sources[slices(begin[frontier], begin[frontier + 1])]
        frontier = np.unique(before[found[before] == FAR])
        level += 1
    return found


def steps_back(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps backwards: those into state s are ``sources[begin[s] : begin[s + 1]]``."""
    sources, columns = np.nonzero(table >= 0)
    targets = table[sources, columns]
    order = np.argsort(targets, kind="stable")
    return np.searchsorted(targets[order], np.arange(len(table) + 1)), sources[order]


def slices(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the indices of consecutive slices, joined."""
    sizes = end - begin
    ends = sizes.cumsum()
    if not len(ends):
        return ends
    return np.arange(ends[-1]) + np.repeat(begin - ends + sizes, sizes)
