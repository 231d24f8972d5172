"""Automaton over the canvases of a masked target: which tokens may stand at which position.

A token may stand at a position iff some filling of the masked positions with legal tokens makes a
row that the automaton accepts. At a position that holds a token already, the answer is the one
that it had if it were masked: the tokens that may replace it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.constraints.canvas import CanvasTable, RowCanvas
from gen.contracts.constraint import Constraint
from gen.contracts.row_constraint import RowConstraint
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.models.targets.base import Target


class CanvasRule:
    """Automaton of a token space as a rule about canvases.

    Attributes:
        table: the automaton over the positions of the space.

    Args:
        space: token space with a constraint.
        banned: tokens that may stand nowhere, bool [V]; None for none.

    Raises:
        GenError: the constraint is no automaton, has another vocabulary, does not allow the prefix,
            or no row of legal tokens is accepted.
    """

    def __init__(self, space: TokenSpace, banned: Tensor | None = None):
        held: Any = space.constraint
        held = held.constraint if isinstance(held, RowConstraint) else held
        automaton = held.automaton() if isinstance(held, Constraint) else None
        if automaton is None:
            raise GenError(
                f"the constraint {type(held).__name__} of the token space is no automaton"
                " (Constraint.automaton), and says what may follow the tokens before a position,"
                " not what may stand between tokens; expected an automaton, or a causal model,"
                " which fills positions left to right"
            )
        if automaton.vocab_size != space.vocab_size:
            raise GenError(
                f"the automaton of the token space has {automaton.vocab_size} token ids; expected"
                f" {space.vocab_size}, those of the space"
            )
        start = 0
        for index, token in enumerate([] if space.prefix is None else space.prefix.tolist()):
            start = automaton.step(start, token)
            if start < 0:
                raise GenError(
                    f"the prefix holds token id {token} at position {index}, which the constraint"
                    " forbids there; expected tokens that some row begins with"
                )
        legal = space.legal.cpu() if banned is None else space.legal.cpu() & ~banned.cpu()
        self.table = CanvasTable(automaton, legal.numpy(), start)
        self.table.require_open()
        self._rows: dict[bytes, RowCanvas] = {}

    def rows(self, canvas: np.ndarray) -> list[RowCanvas]:
        """Return the canvases, int64 [n, T] with -1 where masked.

        They are shared between calls: copy one before it is written to, and hand it back by
        ``remember``.
        """
        keys = [tokens.tobytes() for tokens in canvas]
        found = {
            key: self._rows.get(key) or self.table.row(tokens)
            for key, tokens in zip(keys, canvas, strict=True)
        }
        self._rows = found
        return [found[key] for key in keys]

    def first_contradiction(self, row: RowCanvas) -> int:
        """Find the first position whose token, after those before it, no filling completes; -1
        where there is none."""
        for position in (row.tokens >= 0).nonzero()[0]:
            completes = self.table.open.completes[position + 1]
            if not completes[row.reached[position + 1]].any():
                return int(position)
        return -1

    def remember(self, row: RowCanvas) -> None:
        """Keep a canvas for the next call of ``rows``, which then need not compute it."""
        self._rows[row.tokens.tobytes()] = row


class CanvasStates:
    """Canvases of n rows, or one window of longer ones, under the automaton of a target.

    Args:
        rule: the automaton.
        tokens: long [n, L], the window.
        masked: its masked positions, bool [n, L].
        before: tokens before the window, long [n, k]; all positions behind it are masked.
    """

    def __init__(
        self, rule: CanvasRule, tokens: Tensor, masked: Tensor, before: Tensor | None = None
    ):
        n, width = tokens.shape
        self.rule, self.device = rule, tokens.device
        self.first = 0 if before is None else before.shape[1]
        self.window = slice(self.first, self.first + width)
        whole = np.full((n, len(rule.table.legal)), -1)
        whole[:, self.window] = tokens.masked_fill(masked, -1).cpu().numpy()
        if before is not None:
            whole[:, : self.first] = before.cpu().numpy()
        self.rows = rule.rows(whole)

    def allowed(self) -> Tensor:
        """Tokens that may stand at each position of the window: bool [n, L, V].

        In a row that no filling completes these are all legal tokens: such a draft has no
        probability, so that nothing after it is ever committed.
        """
        positions = range(self.window.start, self.window.stop)
        width = self.rule.table.kinds.shape[1] + 1
        classes = np.zeros((len(self.rows), len(positions), width), dtype=bool)
        for row, found in zip(self.rows, classes, strict=True):
            if row.is_completable:
                for n, position in enumerate(positions):
                    found[n, :-1] = row.classes(position)
        token_class = torch.from_numpy(self.rule.table.automaton.token_class.astype(np.int64))
        token_class = torch.where(token_class < 0, width - 1, token_class).to(self.device)
        allowed = torch.from_numpy(classes).to(self.device)[..., token_class]
        legal = torch.from_numpy(self.rule.table.legal[self.window]).to(self.device)
        whole = [row.is_completable for row in self.rows]
        if not all(whole):
            allowed |= ~torch.tensor(whole, device=self.device)[:, None, None]
        return allowed & legal


class AnyOrderTarget(Target):
    """Target whose positions are filled in any order.

    Attributes:
        canvas_rule: automaton of the space; None where there is none.
    """

    canvas_rule: CanvasRule | None = None

    def _constrain(self) -> None:
        banned = None if self.bias is None else self.bias == -torch.inf
        self.canvas_rule, self._narrow = CanvasRule(self.space, banned), True

    def canvases(self, canvas: Tensor) -> CanvasStates | None:
        """Look at canvases, long [n, T], under the automaton of the space; None without one."""
        if self.canvas_rule is None:
            return None
        return CanvasStates(self.canvas_rule, canvas, self.space.is_masked(canvas))
