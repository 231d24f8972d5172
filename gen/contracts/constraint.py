"""The constraint contract: which tokens may follow which, with a state per row.

A grammar, a JSON schema or a length that must come out is a constraint. It starts a state for the
rows of a batch; the state says which tokens may come next, advances by committed tokens and rolls
back rejected ones. Masks are packed, 32 tokens to an int32, as grammar engines make them.

Token spaces hold rules that recompute everything from the history
(``gen.core.token_space.HistoryConstraint``). ``FromHistory`` gives such a rule a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import HistoryConstraint

BITS = 32


class ConstraintState(ABC):
    """State of a constraint for the rows of a batch. All rows advance by one token at a time."""

    @abstractmethod
    def allowed_bitmask(self) -> Tensor:
        """Return the tokens that may come next: int32 [B, ceil(V / 32)].

        Bit j of word i stands for token 32 i + j.
        """

    @abstractmethod
    def advance(self, tokens: Tensor) -> None:
        """Append one token to every row.

        Args:
            tokens: long [B].
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens of every row back.

        Raises:
            GenError: the rows have fewer tokens.
        """


class Constraint(ABC):
    """Rule about which tokens may follow which (kind ``constraint``)."""

    @abstractmethod
    def start(self, rows: int) -> ConstraintState:
        """Return the state of so many rows without tokens."""


@register("constraint", "from_history")
class FromHistory(Constraint):
    """A rule that recomputes everything from the history, as a constraint with a state."""

    def __init__(self, rule: HistoryConstraint, vocab_size: int, length: int):
        """Take a rule.

        Args:
            rule: rule of a token space.
            vocab_size: V.
            length: most tokens of a row.
        """
        self.rule, self.vocab_size, self.length = rule, vocab_size, length

    def start(self, rows: int) -> ConstraintState:
        return HistoryState(self, rows)


class HistoryState(ConstraintState):
    """Tokens of every row so far, of which a rule recomputes what may come next."""

    def __init__(self, constraint: FromHistory, rows: int):
        self.constraint, self.count = constraint, 0
        self.history = torch.zeros(rows, constraint.length, dtype=torch.long)

    def allowed_bitmask(self) -> Tensor:
        position = torch.full((len(self.history), 1), self.count)
        legal = self.constraint.rule.legal(self.history, position)[:, 0]
        return pack_bitmask(legal.expand(len(self.history), self.constraint.vocab_size))

    def advance(self, tokens: Tensor) -> None:
        if self.count == self.constraint.length:
            raise GenError(f"rows have {self.count} tokens; expected no further one")
        self.history[:, self.count] = tokens
        self.count += 1

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self.count:
            raise GenError(f"count is {count}; expected 0 to {self.count}, the tokens of the rows")
        self.count -= count
        self.history[:, self.count :] = 0


def pack_bitmask(legal: Tensor) -> Tensor:
    """Return allowed tokens, bool [B, V], as int32 [B, ceil(V / 32)]."""
    words = ceil(legal.shape[1] / BITS)
    padded = torch.nn.functional.pad(legal, (0, words * BITS - legal.shape[1]))
    bits = padded.view(len(legal), words, BITS).long()
    packed = (bits << torch.arange(BITS, device=legal.device)).sum(-1)
    # the highest bit is the sign
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Return a packed mask, int32 [B, ceil(V / 32)], as bool [B, V]."""
    bits = bitmask.long()[..., None] >> torch.arange(BITS, device=bitmask.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
