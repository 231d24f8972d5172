"""Conditions of language models beside a text: the turns of a conversation, or token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gen.contracts.checkpoint import Checkpoint
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.models.load.pretrained import chat_token_ids


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation: (role, content) each."""

    turns: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return json.dumps(self.turns, ensure_ascii=False)


@dataclass(frozen=True)
class TokenIds:
    """Token ids of a prompt."""

    ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"tokens {' '.join(map(str, self.ids))}"


class LanguagePrompts(Checkpoint):
    """Checkpoint whose condition is a text, the turns of a conversation or token ids.

    Attributes:
        tokenizer: tokenizer of transformers.
    """

    accepts = frozenset({"text", "messages", "tokens"})
    tokenizer: Any

    def parse(self, condition: Condition) -> str | Conversation | TokenIds:
        """Return the typed condition that one part states.

        Raises:
            GenError: there are several parts, the tokenizer has no chat template for messages, or a
                token id is out of range.
        """
        condition.require(self.accepts, "the model")
        if len(condition.parts) > 1:
            raise GenError(
                f"the model takes one of messages, text and tokens as its condition; got"
                f" {' and '.join(condition.parts)}"
            )
        if condition.tokens is not None:
            size = self.binding.space.vocab_size
            if max(condition.tokens) >= size:
                raise GenError(
                    f"tokens holds {max(condition.tokens)}; the model takes token ids below {size}"
                )
            return TokenIds(condition.tokens)
        if condition.messages is None:
            return self.condition(condition.text or "")
        if not self.tokenizer.chat_template:
            raise GenError(
                "the tokenizer of the model has no chat template, and messages need one; expected"
                " a text"
            )
        return Conversation(tuple((t["role"], t["content"]) for t in condition.messages))

    def ids_of(self, condition: Any) -> list[int] | None:
        """Return the token ids of a condition that is no text; None for a text."""
        if isinstance(condition, TokenIds):
            return list(condition.ids)
        if isinstance(condition, Conversation):
            turns = [{"role": role, "content": content} for role, content in condition.turns]
            return chat_token_ids(self.tokenizer, turns)
        return None
