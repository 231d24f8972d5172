"""Automata over a canvas: what may stand at the positions of a partly filled row.

A token may stand at a position iff the masked positions have some filling with which the automaton
accepts the row. For every position a row knows the states that the tokens before it may lead to,
and those from which the tokens after it may lead to the end, so that a position is asked in one
look at the table. A token that is written changes the first kind of states to its right and the
second to its left; both stop where nothing changes.

A step of a masked model writes several positions from one forward pass. Write them one after the
other, each with a token that fits beside those written before it: no row is ever a dead end.
"""

from __future__ import annotations

import numpy as np

from gen.constraints.budget import BudgetExceeded
from gen.constraints.byte_dfa import distinct_rows, slices
from gen.contracts.constraint import Automaton
from gen.core.errors import GenError

MOST_ANSWERS = 4096
MOST_STEPS = 2**22  # of all kinds of positions; a forward pass looks at them for every position
MOST_CELLS = 2**26  # positions x states of a row


class CanvasTable:
    """Automaton over rows of T positions: what all canvases share.

    Attributes:
        automaton: automaton of rows of exactly T tokens, eos tokens included (``with_eos``).
        legal: tokens that may stand at each position, bool [T, V].
        kinds: classes that have such a token, bool [T, K].
        start: state before position 0.
        open: row whose positions are all masked.

    Args:
        automaton: see above.
        legal: see above.
        start: see above.
    """

    def __init__(self, automaton: Automaton, legal: np.ndarray, start: int = 0):
        self.automaton, self.legal, self.start = automaton, legal, start
        states, classes = automaton.next.shape
        # rows and columns end with the state after a wrong token, which nothing leads from
        self.after = np.where(automaton.next < 0, states, automaton.next)
        # steps by the state before: those of state s are `begin[s]` to `begin[s + 1]`
        before, self._class = np.nonzero(automaton.next >= 0)
        self._begin = np.searchsorted(before, np.arange(states + 1))
        self._target = automaton.next[before, self._class].astype(np.int64)
        self._answers: dict[tuple[bytes, bytes], np.ndarray] = {}  # of `classes`
        self.kinds = self._kinds(classes)
        first, self._pattern, _ = distinct_rows(self.kinds)
        self._require_size(len(first) * len(before), len(legal) * states)
        self._steps = [self._masked_steps(kinds) for kinds in self.kinds[first]]
        self.open = RowCanvas(self)

    def row(self, tokens: np.ndarray) -> RowCanvas:
        """Return the row with these tokens, int [T]; -1 where masked."""
        row = self.open.copy()
        positions = np.flatnonzero(tokens >= 0)
        row.write(positions, tokens[positions])
        return row

    def require_open(self) -> None:
        """Refuse an automaton that accepts no row of T legal tokens.

        Raises:
            GenError: it accepts none.
        """
        if not self.open.is_completable:
            raise GenError(
                f"the constraint accepts no text of exactly {len(self.legal):,} tokens, eos tokens"
                " included; expected one: another number of positions, or another constraint"
            )

    def forward(self, states: np.ndarray, position: int, token: int) -> np.ndarray:
        """Return the states after a position, bool [S], from those before it; token -1: masked."""
        if token < 0:
            return self._steps[self._pattern[position]][0](states)
        found = np.zeros(len(states) + 1, bool)
        kind = self.automaton.token_class[token]
        if kind >= 0:
            found[self.after[states, kind]] = True
        return found[:-1]

    def backward(self, states: np.ndarray, position: int, token: int) -> np.ndarray:
        """Return the states before a position, bool [S], from those after it; token -1: masked."""
        if token < 0:
            return self._steps[self._pattern[position]][1](states)
        kind = self.automaton.token_class[token]
        if kind < 0:
            return np.zeros(len(states), bool)
        return np.append(states, False)[self.after[:, kind]]

    def classes(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the classes of tokens that lead from some states to others: bool [K].

        Args:
            before: states before a position, bool [S].
            after: states after it, bool [S].
        """
        key = np.packbits(before).tobytes(), np.packbits(after).tobytes()
        found = self._answers.get(key)
        if found is None:
            states = np.flatnonzero(before)
            steps = slices(self._begin[states], self._begin[states + 1])
            found = np.zeros(self.kinds.shape[1], bool)
            found[self._class[steps[after[self._target[steps]]]]] = True
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            self._answers[key] = found
        return found

    def _require_size(self, steps: int, cells: int) -> None:
        """Refuse an automaton whose canvases take too long. Raises ``BudgetExceeded``."""
        for count, most, what in (
            (steps, MOST_STEPS, "steps between states"),
            (cells, MOST_CELLS, "states at all positions"),
        ):
            if count > most:
                raise BudgetExceeded(
                    f"structured has {count:,} {what}; a masked model takes at most {most:,}:"
                    " expected a smaller rule, fewer positions or a causal model",
                    "states",
                )

    def _kinds(self, classes: int) -> np.ndarray:
        """Return the classes with a legal token at each position: bool [T, K]."""
        first, which, _ = distinct_rows(np.packbits(self.legal, axis=1))
        kinds = np.zeros((len(first), classes + 1), bool)
        row, token = self.legal[first].nonzero()
        kinds[row, self.automaton.token_class[token]] = True
        return kinds[which, :-1]

    def _masked_steps(self, kinds: np.ndarray) -> tuple[_Steps, _Steps]:
        """Return the steps that a token of some classes may make, forwards and backwards."""
        before, column = np.nonzero(self.automaton.next[:, kinds] >= 0)
        after = self.automaton.next[:, kinds][before, column]
        return _Steps(before, after, len(self.after)), _Steps(after, before, len(self.after))


class _Steps:
    """Steps between states: which states some of a set lead to."""

    def __init__(self, sources: np.ndarray, targets: np.ndarray, states: int):
        pairs = np.unique(targets.astype(np.int64) * states + sources)
        self.sources = pairs % states
        self.targets, self.begin = np.unique(pairs // states, return_index=True)
        self.states = states

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the states that a set leads to: bool [S] of bool [S]."""
        found = np.zeros(self.states, bool)
        if len(self.begin):
            found[self.targets] = np.logical_or.reduceat(states[self.sources], self.begin)
        return found


class RowCanvas:
    """Row of T positions under an automaton (``CanvasTable.row``).

    Attributes:
        tokens: int64 [T]; -1 where masked.
        reached: states that the tokens before each position may lead to, bool [T + 1, S].
        completes: states from which the tokens from each position on may be accepted, bool
            [T + 1, S].
    """

    def __init__(self, table: CanvasTable):
        states, length = len(table.after), len(table.legal)
        self.table = table
        self.tokens = np.full(length, -1)
        self.reached = np.zeros((length + 1, states), bool)
        self.completes = np.zeros((length + 1, states), bool)
        self.reached[0, table.start] = True
        self.completes[-1] = table.automaton.accepting
        self._found = np.zeros_like(table.kinds)  # answers of `classes`
        self._is_found = np.zeros(length, bool)
        self._forward(0, length)
        self._backward(length - 1, 0)

    def copy(self) -> RowCanvas:
        """Return a row that may be written to without a change to this one."""
        twin = object.__new__(RowCanvas)
        twin.table, twin.tokens = self.table, self.tokens.copy()
        twin.reached, twin.completes = self.reached.copy(), self.completes.copy()
        twin._found, twin._is_found = self._found.copy(), self._is_found.copy()
        return twin

    @property
    def is_completable(self) -> bool:
        """True where some filling of the masked positions is accepted."""
        return bool(self.completes[0, self.table.start])

    def classes(self, position: int) -> np.ndarray:
        """Return the classes of tokens that may stand at a position: bool [K]."""
        if not self._is_found[position]:
            found = self.table.classes(self.reached[position], self.completes[position + 1])
            self._found[position] = found & self.table.kinds[position]
            self._is_found[position] = True
        return self._found[position]

    def allowed(self, position: int) -> np.ndarray:
        """Return the tokens that may stand at a position: bool [V].

        At a position that holds a token, these are the tokens that may replace it.
        """
        classes = np.append(self.classes(position), False)
        return classes[self.table.automaton.token_class] & self.table.legal[position]

    def fits(self, position: int, token: int) -> bool:
        """Return True for a token that may stand at a position."""
        kind = self.table.automaton.token_class[token]
        return bool(kind >= 0 and self.table.legal[position, token]) and bool(
            self.classes(position)[kind]
        )

    def write(self, positions: np.ndarray, tokens: np.ndarray | int) -> None:
        """Put tokens at positions, int [n] each; token -1 masks a position again.

        Tokens that no filling completes are written all the same (``is_completable``).
        """
        if len(positions):
            self.tokens[positions] = tokens
            self._forward(int(positions.min()), int(positions.max()))
            self._backward(int(positions.max()), int(positions.min()))

    def _forward(self, first: int, changed: int) -> None:
        """Renew ``reached`` from a position on; ``changed``: the last position that changed."""
        for position in range(first, len(self.tokens)):
            states = self.table.forward(self.reached[position], position, self.tokens[position])
            if not (states == self.reached[position + 1]).all():
                self.reached[position + 1] = states
                self._is_found[position + 1 : position + 2] = False
            elif position >= changed:
                return

    def _backward(self, last: int, changed: int) -> None:
        """Renew ``completes`` up to a position; ``changed``: the first position that changed."""
        for position in range(last, -1, -1):
            after = self.completes[position + 1]
            states = self.table.backward(after, position, self.tokens[position])
            if not (states == self.completes[position]).all():
                self.completes[position] = states
                self._is_found[max(position - 1, 0)] = False
            elif position <= changed:
                return
