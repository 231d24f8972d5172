"""Stops: texts after which a row is over.

A stop may begin and end inside of tokens. An automaton over bytes (Aho and Corasick, 1975) says how
much of which stop the bytes so far end with; the token that completes one is the row's last, and
the eos token follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gen.contracts.constraint import Constraint, ConstraintState, pack_bools
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.row_rules import OVER


class StopConstraint(Constraint):
    """Constraint after whose stops the eos token alone may follow.

    Args:
        vocab_size: V.
        eos_token_id: token that fills rows that are over.
        texts: texts that end a row.
        vocabulary: bytes of every token.
        first: first position whose token may complete a stop.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_id: int,
        texts: Sequence[str],
        vocabulary: Vocabulary,
        first: int = 0,
    ):
        self.vocab_size, self.first, self.vocabulary = vocab_size, first, vocabulary
        self.steps = _matcher([text.encode() for text in texts])
        every, only = np.ones(vocab_size, dtype=bool), np.zeros(vocab_size, dtype=bool)
        only[eos_token_id] = True
        self.every, self.only_eos = pack_bools(every), pack_bools(only)
        self._going_on: dict[tuple[int, bool], np.ndarray] = {}

    def start(self) -> ConstraintState:
        return StopState(self)

    def step(self, state: int, token: int, is_first: bool) -> int:
        """Return the state after a token.

        Args:
            state: bytes of stops that the row ends with, as a state of the automaton.
            token: token id.
            is_first: whether it is the first token of the row.
        """
        if state == OVER:
            return state
        parts = self.vocabulary.first if is_first else self.vocabulary.later
        for byte in parts[token] or b"":
            state = self.steps[state].get(byte, 0)
            if state == OVER:
                return OVER
        return state

    def going_on(self, state: int, is_first: bool) -> np.ndarray:
        """Return the tokens that complete no stop, as a mask of int32 [ceil(V / 32)]."""
        key = state, is_first
        if key not in self._going_on:
            after = [self.step(state, token, is_first) for token in range(self.vocab_size)]
            self._going_on[key] = pack_bools(np.array(after) != OVER)
        return self._going_on[key]


class StopState(ConstraintState):
    """States that a row went through."""

    def __init__(self, stops: StopConstraint):
        self.stops, self.states = stops, [0]

    def allowed_bitmask(self, remaining: int) -> np.ndarray:
        state, position = self.states[-1], len(self.states) - 1
        if state == OVER:
            return self.stops.only_eos
        if position < self.stops.first:
            return self.stops.going_on(state, position == 0)
        return self.stops.every

    def advance(self, token: int) -> bool:
        state, position = self.states[-1], len(self.states) - 1
        following = self.stops.step(state, token, position == 0)
        if following == OVER and position < self.stops.first:
            return False
        self.states.append(following)
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.states):
            raise GenError(
                f"count is {count}; expected 0 to {len(self.states) - 1}, the tokens of the row"
            )
        del self.states[len(self.states) - count :]


def _matcher(texts: Sequence[bytes]) -> list[dict[int, int]]:
    """Build the automaton that finds texts in bytes.

    Args:
        texts: texts to find, none of them empty.

    Returns:
        Of every state the state after each byte, ``OVER`` where a text is complete; bytes that are
        missing lead to state 0.
    """
    steps: list[dict[int, int]] = [{}]
    for text in texts:
        state = 0
        for byte in text[:-1]:
            following = steps[state].get(byte)
            if following == OVER:
                break
            if following is None:
                following = steps[state][byte] = len(steps)
                steps.append({})
            state = following
        else:
            steps[state][text[-1]] = OVER
    queue = deque((state, 0) for state in steps[0].values() if state != OVER)
    while queue:
        state, fallback = queue.popleft()
        for byte, following in list(steps[state].items()):
            shorter = steps[fallback].get(byte, 0)
            if shorter == OVER:
                steps[state][byte] = OVER
            elif following != OVER:
                queue.append((following, shorter))
        steps[state] = {**steps[fallback], **steps[state]}
    return steps
