"""Constraints whose rows are filled to the last position, with tokens allowed by position."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gen.constraints.budget import check, require_bytes
from gen.contracts.constraint import (
    Automaton,
    AutomatonConstraint,
    AutomatonState,
    ConstraintState,
    pack_bools,
)
from gen.core.errors import GenError


class PositionedConstraint(AutomatonConstraint):
    """An automaton whose texts have exactly T tokens, each allowed at its position.

    Args:
        automaton: the automaton.
        legal: tokens that may stand at each position, bool [T, V].

    Raises:
        GenError: no text of T tokens is accepted.
    """

    def __init__(self, automaton: Automaton, legal: np.ndarray):
        super().__init__(automaton)
        self.rule, self.legal = automaton, legal
        if not self.completable[0, 0]:
            raise GenError(
                f"the constraint accepts no text of exactly {len(legal):,} tokens; expected one,"
                " since this model fills all positions"
            )

    @cached_property
    def completable(self) -> np.ndarray:
        """States at each position from which the row can be filled, bool [T + 1, S + 1].

        The last column, False, is the state after a wrong token.
        """
        length, (states, classes) = len(self.legal), self.rule.next.shape
        require_bytes((length + 1) * (states + 1) + self.rule.next.size * 2)
        found = np.zeros((length + 1, states + 1), bool)
        found[length, :-1] = self.rule.accepting
        for position in range(length - 1, -1, -1):
            check()
            allowed = self.rule.token_class[self.legal[position]]
            is_legal = np.zeros(classes + 1, bool)
            is_legal[allowed] = True
            after = found[position + 1][self.rule.next[:, is_legal[:-1]]]
            found[position, :-1] = after.any(1)
        return found

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.completable.nbytes + self.legal.nbytes

    def start(self) -> ConstraintState:
        return _PositionedState(self)


class _PositionedState(AutomatonState):
    """States that a row went through; ``remaining`` tells the position."""

    def __init__(self, constraint: PositionedConstraint):
        super().__init__(constraint.rule)
        self.constraint = constraint

    def allowed_bitmask(self, remaining: int) -> np.ndarray:
        rule, state = self.automaton, self.states[-1]
        position = len(self.constraint.legal) - remaining
        classes = self.constraint.completable[position + 1][rule.next[state]]
        allowed = np.append(classes, False)[rule.token_class]
        return pack_bools(allowed & self.constraint.legal[position])
