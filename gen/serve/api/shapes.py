"""Shapes of the responses of ``/v1/completions`` and ``/v1/chat/completions``, whole and in
parts."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from math import isnan
from typing import Any

from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.core.tool_calls import Said
from gen.core.versions import gen_version
from gen.serve.api.echo import Echo, known
from gen.serve.api.tools import ToolUse
from gen.tokenizers.base.text_bytes import BROKEN


class Completions:
    """Shape of the responses of ``/v1/completions``.

    Args:
        echo: prompts that texts begin with.
    """

    name, prefix = "text_completion", "cmpl"

    def __init__(self, echo: Echo | None = None):
        self.echo = echo or Echo()

    def head(self) -> dict[str, Any]:
        """Return what every response says beside its choices."""
        return {"system_fingerprint": f"gen-{gen_version()}"}

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """Return what a choice says of its text, and of the reason that it ended."""
        return {"text": text, "finish_reason": reason}

    def stream(self, i: int) -> TextParts:
        """Return what writes the parts of choice ``i`` of a stream."""
        return TextParts(self.echo.text(i))

    def logprobs(self, found: ItemLogprobs, start: int = 0) -> dict[str, Any]:
        """Return log-probabilities of the tokens of a choice.

        Args:
            found: log-probabilities of its tokens.
            start: characters that were given.
        """
        tokens = [token for token in found if token is not None]
        return {
            "tokens": [token.text or "" for token in tokens],
            "token_logprobs": [known(token.logprob) for token in tokens],
            "top_logprobs": [None if isnan(t.logprob) else _by_text(t) for t in tokens],
            "text_offset": _offsets(tokens, start),
        }


class TextParts:
    """Writer of the parts of one choice of ``/v1/completions``.

    Args:
        opening: text that comes before that of the model.
    """

    def __init__(self, opening: str = ""):
        self.opening = opening

    def first(self) -> list[dict[str, Any]]:
        """Return what comes before the text of the model."""
        return self.part(self.opening) if self.opening else []

    def part(self, text: str) -> list[dict[str, Any]]:
        """Return what comes of a part of the text."""
        return [{"text": text}]

    def last(self, reason: str) -> list[dict[str, Any]]:
        """Return what comes at the end; the last one has the reason that the text ended."""
        return [{"text": "", "finish_reason": reason}]


class Chats(Completions):
    """Shape of the responses of ``/v1/chat/completions``.

    Args:
        use: what answers may call; None for nothing.
    """

    name, prefix = "chat.completion", "chatcmpl"

    def __init__(self, use: ToolUse | None = None):
        super().__init__()
        self.use = use

    def head(self) -> dict[str, Any]:
        return {**super().head(), "service_tier": "default"}

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.use is not None:
            content, calls, is_whole = self.use.read(text)
            if calls:
                message |= {"content": content or None, "tool_calls": list(map(_called, calls))}
                reason = "tool_calls" if is_whole else reason
        return {"message": message, "finish_reason": reason}

    def stream(self, i: int) -> TextParts:
        return ChatParts() if self.use is None else CallParts(self.use)

    def logprobs(self, found: ItemLogprobs, start: int = 0) -> dict[str, Any]:
        def said(text: str, raw: bytes | None, logprob: float) -> dict[str, Any]:
            if raw is None and BROKEN not in text:  # special tokens are spelt
                raw = text.encode()
            numbers = None if raw is None else list(raw)
            return {"token": text, "logprob": known(logprob), "bytes": numbers}

        content = []
        for t in found:
            if t is not None:
                tops = zip(t.top_texts or (), t.top_bytes or (), t.top, strict=True)
                top = [said(text, raw, x) for text, raw, (_, x) in tops]
                own = said(t.text or "", t.text_bytes, t.logprob)
                content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}


class ChatParts(TextParts):
    """Writer of the parts of one choice of ``/v1/chat/completions``."""

    def first(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": "", "refusal": None}}]

    def part(self, text: str) -> list[dict[str, Any]]:
        return [{"delta": {"content": text}}]

    def last(self, reason: str) -> list[dict[str, Any]]:
        return [{"delta": {}, "finish_reason": reason}]


class CallParts(ChatParts):
    """Writer of the parts of one choice that may call functions.

    Args:
        use: the functions.
    """

    def __init__(self, use: ToolUse):
        super().__init__()
        self.use, self.reader = use, use.reader()

    def first(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": None, "refusal": None}}]

    def part(self, text: str) -> list[dict[str, Any]]:
        return [self._said(said) for said in self.reader.feed(text)]

    def last(self, reason: str) -> list[dict[str, Any]]:
        rest = [self._said(said) for said in self.reader.finish()]
        is_called = self.reader.count and not self.reader.is_open
        return rest + super().last("tool_calls" if is_called else reason)

    def _said(self, said: Said) -> dict[str, Any]:
        """Return the delta of a part of an answer."""
        if said.call is None:
            return {"delta": {"content": said.text}}
        call: dict[str, Any] = {"index": said.call, "function": {"arguments": said.text}}
        if said.name is not None:
            call |= _called(
                {"id": self.use.form.new_id(), "name": said.name, "arguments": said.text}
            )
        return {"delta": {"tool_calls": [call]}}


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as OpenAI's API shows it."""
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return log-probabilities by text. Of equal texts of several tokens one keeps its text, that
    of the drawn token first; the others are spelt ``token_id:7``."""
    taken, found = {token.text: token.token_id}, {}
    for text, (token_id, x) in zip(token.top_texts or (), token.top, strict=True):
        own = taken.setdefault(text, token_id) == token_id
        found[text if own else f"token_id:{token_id}"] = known(x)
    return found


def _offsets(tokens: Sequence[TokenLogprob], start: int) -> list[int]:
    """Return the position of each token in the text, in characters: that of the character that it
    belongs to."""
    decoder, offsets = getincrementaldecoder("utf-8")("replace"), []
    for token in tokens:
        raw = token.text_bytes or b""
        start += len(decoder.decode(raw[:1]))
        is_inside = bool(decoder.getstate()[0]) or not raw  # of a character that is not over
        offsets.append(start if is_inside else start - 1)
        start += len(decoder.decode(raw[1:]))
    return offsets
