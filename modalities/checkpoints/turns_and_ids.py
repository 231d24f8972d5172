"""Conditions of language models beside a text: the turns of a conversation, or token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gen.contracts.checkpoint import Checkpoint
from gen.contracts.condition import Condition
from gen.core.errors import GenError, bad_value
from gen.core.tool_calls import DEFAULT, ToolFormat
from gen.models.load.chat import chat_text, own_format
from gen.models.load.networks import config_field

TOKEN_CHARACTERS = 64  # that a token may stand for, with the spaces and unknown words around it

Content = str | tuple[tuple[str, str], ...]  # a text, or (type, text) of every part


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation, and what its answer may call.

    Attributes:
        turns: role and content each.
        calls: further keys of the turns that have some, as JSON text by the number of the turn.
        functions: tools as JSON text; empty for none.
    """

    turns: tuple[tuple[str, Content], ...]
    calls: tuple[tuple[int, str], ...] = ()
    functions: str = ""

    @classmethod
    def of(
        cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """Return the conversation of messages and tools as ``Condition`` has them."""
        turns = tuple((turn["role"], _content(turn["content"])) for turn in messages)
        further = [{k: v for k, v in t.items() if k not in ("role", "content")} for t in messages]
        calls = tuple((n, json.dumps(more)) for n, more in enumerate(further) if more)
        return cls(turns, calls, json.dumps(tools) if tools else "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Turns as chat templates take them."""
        further = {n: json.loads(text) for n, text in self.calls}
        return [
            {"role": role, "content": _spelled(content), **further.get(n, {})}
            for n, (role, content) in enumerate(self.turns)
        ]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools as chat templates take them."""
        return json.loads(self.functions) if self.functions else []

    @property
    def images(self) -> int:
        """Number of positions of images."""
        parts = (
            part for _, content in self.turns if not isinstance(content, str) for part in content
        )
        return sum(kind == "image" for kind, _ in parts)

    def __str__(self) -> str:
        more = (self.calls, self.functions) if self.calls or self.functions else ()
        return json.dumps((self.turns, *more) if more else self.turns, ensure_ascii=False)


def _content(content: str | Sequence[Mapping[str, str]]) -> Content:
    if isinstance(content, str):
        return content
    return tuple((part["type"], part.get("text", "")) for part in content)


def _spelled(content: Content) -> str | list[dict[str, str]]:
    """Return a content as chat templates take it."""
    if isinstance(content, str):
        return content
    return [{"type": k, **({"text": text} if k == "text" else {})} for k, text in content]


@dataclass(frozen=True)
class TokenIds:
    """Token ids of a prompt."""

    ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"tokens {' '.join(map(str, self.ids))}"


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of a conversation."""
    for turn in messages:
        content = turn["content"]
        for part in [{"text": content}] if isinstance(content, str) else content or ():
            yield part.get("text") or ""


def require_messages(condition: Condition) -> None:
    """Raise ``GenError`` for tools without the messages that may call them."""
    if condition.tools and condition.messages is None:
        raise GenError("tools came without messages; expected the turns of a conversation")


class LanguagePrompts(Checkpoint):
    """Checkpoint whose condition is a text, the turns of a conversation or token ids.

    Attributes:
        tokenizer: tokenizer of transformers.
        chat: whether prompts go into its chat template.
    """

    accepts = frozenset({"text", "messages", "tools", "tokens"})
    tokenizer: Any
    chat: bool = False

    @property
    def needs_prompt(self) -> bool:
        """Whether nothing stands before a text without a prompt: its tokenizer adds no token."""
        return self.chat or not self.tokenizer("")["input_ids"]

    def condition(self, prompt: str) -> str:
        """Return a text; an empty one where the model can begin without a prompt."""
        if not prompt.strip() and not self.needs_prompt:
            return ""
        return super().condition(prompt)

    @property
    def tool_format(self) -> ToolFormat | None:
        templates = self.tokenizer
        return (own_format(templates) or DEFAULT) if templates.chat_template else None

    def parse(self, condition: Condition) -> str | Conversation | TokenIds:
        """Return the typed condition that one part states.

        Raises:
            GenError: there are several parts, the tokenizer has no chat template for messages or
                its template refuses them, or a token id is out of range.
        """
        condition.require(self.accepts, "the model")
        asked = [part for part in condition.parts if part != "tools"]
        if len(asked) > 1:
            raise GenError(
                "the model takes one of messages, text and tokens as its condition; got"
                f" {' and '.join(asked)}"
            )
        require_messages(condition)
        if condition.tokens is not None:
            return self.given_ids(condition.tokens)
        self.require_short(condition.text or "", *texts_of(condition.messages or ()))
        if condition.messages is None:
            return self.condition(condition.text or "")
        if not self.tokenizer.chat_template:
            raise GenError(
                "the tokenizer of the model has no chat template, and messages need one; expected"
                " a text"
            )
        conversation = Conversation.of(condition.messages, condition.tools)
        if conversation.images:
            raise GenError(
                "the conversation has a part of type 'image', and the model takes texts alone"
            )
        self.ids_of(conversation)  # a conversation that the template refuses fails here
        return conversation

    @cached_property
    def most_characters(self) -> float:
        """Characters of a prompt of which at least so many tokens are made as the model has
        positions."""
        config = self.model.config.get_text_config()
        positions = config_field(config, "max_position_embeddings")
        longest = max(map(len, self.tokenizer.get_vocab()), default=0)
        return math.inf if positions is None else positions * max(longest, TOKEN_CHARACTERS)

    def require_short(self, *texts: str) -> None:
        """Refuse a prompt that cannot fit the model before it is made into tokens.

        Raises:
            GenError: its texts have too many characters.
        """
        count = sum(map(len, texts))
        if count > self.most_characters:
            raise GenError(
                f"the prompt has {count:,} characters; expected at most {self.most_characters:,},"
                " as many as the positions of the model can hold"
            )

    def raw_ids(self, text: str) -> list[int]:
        """See ``Modality.raw_ids``. A text that begins with the bos token gets no second one."""
        self.require_short(text)
        bos = self.tokenizer.bos_token
        more = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
        ids = self.tokenizer(text, **more)["input_ids"]
        if not ids:
            raise GenError("the prompt is empty; expected a text")
        return list(ids)

    def given_ids(self, tokens: tuple[int, ...]) -> TokenIds:
        """Return token ids as a condition. Raises ``GenError`` for one out of range."""
        size = self.binding.space.vocab_size
        if max(tokens) >= size:
            raise GenError(f"tokens holds {max(tokens)}; the model takes token ids below {size}")
        return TokenIds(tokens)

    def ids_of(self, condition: Any) -> list[int] | None:
        """Return the token ids of a condition that is no text; None for a text."""
        if isinstance(condition, TokenIds):
            return list(condition.ids)
        if isinstance(condition, Conversation):
            return self.chat_ids(condition.messages, condition.tools)
        return None

    def chat_ids(
        self, chat: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a conversation, or of a message of the user, up to the start of
        the answer. Raises ``GenError`` where the template refuses it, or makes a text of it that is
        too long or has no tokens."""
        text = chat_text(self.tokenizer, chat, "", tools)
        self.require_short(text)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise bad_value(
                "what the chat template of the model makes of the prompt",
                text,
                "a text that its tokenizer has tokens for",
            )
        return ids
