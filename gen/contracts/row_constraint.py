"""Constraint of the rows of a target, which asks statelessly (``HistoryConstraint``).

A state per row moves from one text to the next by the tokens in which they differ. A draft that was
rejected is thereby rolled back, in chains, trees and windows alike, and a row that became another
item begins anew.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from gen.contracts.constraint import BITS, Constraint, ConstraintState


class RowConstraint:
    """A constraint as token spaces hold it (``gen.core.token_space.HistoryConstraint``).

    Args:
        constraint: the constraint.
        length: positions of a row, T.
    """

    def __init__(self, constraint: Constraint, length: int):
        self.constraint, self.length = constraint, length
        self._rows: list[_Row] = []

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Return the allowed tokens at positions: bool [n, L, V].

        After tokens that may not come, or after which the text gets too long, every token is
        allowed: such a draft has no probability, so that nothing after it is ever committed.

        Args:
            history: long [n, T], one token per position.
            positions: long [n, L].
        """
        while len(self._rows) < len(history):
            self._rows.append(_Row(self.constraint.start()))
        words = ceil(self.constraint.vocab_size / BITS)
        masks = np.empty((*positions.shape, words), dtype=np.int32)
        texts, asked = history.tolist(), positions.tolist()
        for n, (text, wanted) in enumerate(zip(texts, asked, strict=True)):
            row = self._rows[n]
            for column in np.argsort(wanted, kind="stable"):
                position = wanted[column]
                masks[n, column] = row.mask(text[:position], self.length - position, words)
        packed = torch.from_numpy(masks).to(history.device).flatten(0, 1)
        legal = unpack_bitmask(packed, self.constraint.vocab_size)
        return legal.view(*positions.shape, -1)


class _Row:
    """State of a row, and the tokens that it has seen."""

    def __init__(self, state: ConstraintState):
        self.state = state
        self.tokens: list[int] = []

    def mask(self, text: list[int], remaining: int, words: int) -> np.ndarray:
        """Move the state to a text, and return what may follow it; all tokens after a wrong one."""
        same = 0
        for old, new in zip(self.tokens, text, strict=False):
            if old != new:
                break
            same += 1
        if len(self.tokens) > same:
            self.state.rollback(len(self.tokens) - same)
            del self.tokens[same:]
        for token in text[same:]:
            if not self.state.advance(token):
                return np.full(words, -1, dtype=np.int32)
            self.tokens.append(token)
        found = self.state.allowed_bitmask(remaining)
        if not found.any() and self.tokens and not self._was_last_allowed(remaining):
            found[:] = -1
        return found

    def _was_last_allowed(self, remaining: int) -> bool:
        """Decide whether the last token could come, so many positions before the end."""
        token = self.tokens[-1]
        self.state.rollback(1)
        word = self.state.allowed_bitmask(remaining + 1)[token // BITS]
        self.state.advance(token)
        return bool(word >> token % BITS & 1)


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Return packed masks, int32 [n, ceil(V / 32)], as bool [n, V]."""
    bits = bitmask[..., None] >> torch.arange(BITS, dtype=torch.int32, device=bitmask.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
