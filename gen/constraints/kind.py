"""Kind of constraint: what a key of ``structured`` stands for (registry kind ``constraint``).

A kind is a frozen dataclass. Its first field is the value of the key, the others are options that
stand beside it: ``{"graph": [...], "hops": 2}``. ``language`` returns the accepted texts in the
form that comes easiest; ``gen.constraints.build`` makes a constraint of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from gen.constraints.byte_dfa import ByteDFA
from gen.contracts.constraint import Automaton, Constraint
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError, bad_value


@dataclass(frozen=True)
class TokenLanguage:
    """Language of bytes with its own bytes for every token id (``gen.constraints.ids``).

    Attributes:
        dfa: the language.
        tokens: bytes of every token, [V].
    """

    dfa: ByteDFA
    tokens: list[bytes]


Language = ByteDFA | TokenLanguage | Automaton | Constraint


@dataclass(frozen=True)
class Context:
    """Model and request that a constraint is built for.

    Attributes:
        vocabulary: bytes of every token; None where tokens are no text.
        vocab_size: V.
        ends: eos token ids; empty where a row always fills its positions.
        positions: positions of a row.
        legal: tokens that may stand at each position, bool [T, V].
        left_to_right: whether positions are filled in order.
    """

    vocabulary: Vocabulary | None
    vocab_size: int
    ends: tuple[int, ...]
    positions: int
    legal: np.ndarray
    left_to_right: bool = True

    def require_text(self, kind: str) -> Vocabulary:
        """Return the bytes of the tokens.

        Raises:
            GenError: the tokens of the model are no text.
        """
        if self.vocabulary is None:
            raise GenError(
                f"structured.{kind} is about text and the tokens of this model are not; expected"
                " choice, trie or graph with token ids"
            )
        return self.vocabulary

    def require_id(self, name: str, token: int) -> int:
        """Return a token id.

        Raises:
            GenError: the id is outside of the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise bad_value(name, token, f"token ids below {self.vocab_size}")
        return token


class ConstraintKind(ABC):
    """Base of the kinds."""

    @abstractmethod
    def language(self, context: Context) -> Language:
        """Return the texts that are accepted.

        Raises:
            GenError: the value or an option is none that this kind takes.
        """

    def alternative(self, context: Context) -> ConstraintKind | None:
        """Return the rule for another engine, which is built where this one is not supported or
        exceeds its budget; None where there is none."""
        return None
