"""Ends of rows: a token that ends them, a stop, or the last token that an item may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gen.core.row_rules import OVER

if TYPE_CHECKING:
    from gen.models.targets.base import Target


class RowEnds:
    """Tokens after which rows are over, as the host knows them. A row that is over takes no further
    forward pass; the eos token fills its later positions."""

    def __init__(self, target: Target):
        space = target.space
        self.token_ids, self.stops, self.limits = space.row_ends, space.stops, target.limits
        self.prefix = [] if space.prefix is None else space.prefix.tolist()
        self.states: dict[int, int] = {}  # of each item's stops

    def tokens_to_end(
        self, items: np.ndarray, start: np.ndarray, tokens: np.ndarray, committed: np.ndarray
    ) -> np.ndarray:
        """Count the new tokens [b, W] up to the one after which their row is over, int64 [b]; 0
        where the row goes on. Each row has an item, ``start`` tokens before and ``committed`` new
        ones, int64 [b] each."""
        column = np.arange(tokens.shape[1])
        several = len(self.token_ids) > 1  # comparing to one takes less time
        found = np.isin(tokens, self.token_ids) if several else tokens == self.token_ids[0]
        if self.limits is not None:
            found = found | (start[:, None] + column + 1 >= self.limits[items][:, None])
        found = found & (column < committed[:, None])
        for row, item in enumerate(items.tolist() if self.stops is not None else ()):
            new = tokens[row, : committed[row]].tolist()
            state = self.states[item] if start[row] else self._follow(0, self.prefix, 0)[0]
            self.states[item], at = self._follow(state, new, len(self.prefix) + int(start[row]))
            if at is not None:
                found[row, at] = True
        return np.where(found.any(1), found.argmax(1) + 1, 0)

    def _follow(self, state: int, tokens: list[int], position: int) -> tuple[int, int | None]:
        """Return the state after tokens, and the number of the one that ends the row, if any."""
        assert self.stops is not None, "asked only where there are stops"
        for number, token in enumerate(tokens):
            state = self.stops.step(state, token, position + number == 0)
            if state == OVER:
                return state, number
        return state, None
