"""Protocols of rules that look at the tokens of a row: which may follow, and where it ends."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HistoryConstraint(Protocol):
    """Rule about which tokens may follow which: a length that must come out, a grammar.

    It is asked left to right, so by causal models alone. ``gen.contracts.constraint`` has the form
    with a state per row, and automata, which masked models take.
    """

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Return the allowed tokens at positions, given the tokens before each.

        Every position must be left at least one of the tokens that the space allows there, also
        after tokens that should not have come: drafts are asked about before they are judged.

        Args:
            history: long [n, T], one token per position. Entries at or after a position say nothing
                about it.
            positions: long [n, L].

        Returns:
            Bool [n, L, V].
        """
        ...


OVER = -1  # state of a row that is over


class StopRule(Protocol):
    """Rule by which a row ends at a token that is no end by itself."""

    def step(self, state: int, token: int, is_first: bool) -> int:
        """Return the state of a row after a token, ``OVER`` where it is over; 0 is the first.

        Args:
            state: state before the token.
            token: token id.
            is_first: whether it is the first token of the row.
        """
        ...
