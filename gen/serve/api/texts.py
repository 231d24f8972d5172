"""``/v1/chat/completions`` and ``/v1/completions``, whole or as server-sent events."""

from __future__ import annotations

import secrets
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from gen.contracts.condition import Condition
from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, item_info
from gen.serve.api.chat import Message, condition_of
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import (
    MOST_LOGPROBS,
    MOST_TOKENS,
    Fields,
    Name,
    SamplerFields,
    Text,
    TokenIds,
    only,
)
from gen.tokenizers.base.text_bytes import BROKEN

MOST, MOST_PROMPTS = 128, 2048
Prompts = Text | Annotated[list[Text], Field(max_length=MOST_PROMPTS, fail_fast=True)]
END = b"data: [DONE]\n\n"


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    """Schema that an answer satisfies."""

    name: Name = "schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """Form of an answer."""

    type: Literal["text", "json_schema", "json_object"]
    json_schema: JsonSchema | None = None


class TextFields(SamplerFields):
    """Fields of both endpoints."""

    model: Name = Field("text", description="Id of a model that writes text.")
    n: int | None = Field(1, ge=1, le=MOST)
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured: dict[str, Any] | None = Field(None, description="Rule that the text obeys.")
    min_new_tokens: int | None = Field(None, le=MOST_TOKENS)
    max_new_tokens: int | None = None
    max_length: int | None = Field(
        None, le=MOST_TOKENS, description="Most tokens of prompt and output together."
    )
    prefix: Text | None = Field(None, description="Text that every output begins with.")

    def limits(self, *names: str) -> dict[str, Any]:
        """Return ``max_new_tokens``, which may come under several names. Raises ``ApiError``."""
        given = {n: getattr(self, n) for n in (*names, "max_new_tokens")}
        came = {name: value for name, value in given.items() if value is not None}
        if len(set(came.values())) > 1:
            message = f"{' and '.join(came)} are names of one limit; expected one of them"
            raise ApiError(message, next(iter(came)), "invalid_value")
        for name, value in came.items():
            if not 1 <= value <= MOST_TOKENS:
                message = f"{name} is {value}; expected an integer from 1 to {MOST_TOKENS}"
                raise ApiError(message, name, "invalid_value")
        return {"max_new_tokens": max(came.values())} if came else {}

    def start(self) -> EditSpec:
        """Return the text to begin with. Raises ``ApiError`` for one that names a file."""
        if self.prefix is not None and self.prefix.lower().endswith(".txt"):
            message = f"prefix is {shown(self.prefix)}; expected a text, and no name of a file"
            raise ApiError(message, "prefix", "invalid_value")
        return EditSpec(prefix=self.prefix)


class CompletionRequest(TextFields):
    """Body of ``/v1/completions``."""

    prompt: Prompts | TokenIds
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Text | None = None


class ChatRequest(TextFields):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    store: bool | None = None
    metadata: dict[str, Name] | None = Field(None, max_length=64)

    def sampling(self) -> dict[str, Any]:
        values = {k: v for k, v in super().sampling().items() if k != "logprobs"}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            message = f"top_logprobs is {self.top_logprobs} without logprobs; expected logprobs"
            raise ApiError(message, "top_logprobs", "invalid_value")
        if self.response_format is not None and self.response_format.type != "text":
            values["structured"] = self._structured(self.response_format)
        return values

    def _structured(self, form: ResponseFormat) -> dict[str, Any]:
        """Return the rule of a response format. Raises ``ApiError``."""
        if self.structured is not None:
            message = "structured and response_format are both given; expected one of them"
            raise ApiError(message, "response_format", "invalid_value")
        if form.json_schema is None or form.json_schema.schema_ is None:
            message = (
                f"response_format is {form.type!r} without a schema; expected"
                ' {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
            raise ApiError(message, "response_format", "invalid_value")
        return {"json_schema": form.json_schema.schema_}


def text_router(calls: Calls) -> APIRouter:
    """Return the routes of texts."""
    router = APIRouter(tags=["text"], route_class=BodyRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Write what follows a prompt, or answer it."""
        calls.served(body.model, ("text",), "/v1/completions")
        return await _answer(calls, body, wanted_completion(body), request, Completions())

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        """Answer a conversation."""
        calls.served(body.model, ("text",), "/v1/chat/completions")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_chat, body, pipe.modality)
        return await _answer(calls, body, wanted, request, Chats())

    return router


def wanted_completion(body: CompletionRequest) -> Wanted:
    """Return what a body asks for. Raises ``ApiError`` for what no model of gen can do."""
    only(body.echo, (False,), "echo", "an output holds no prompt")
    only(body.best_of, (body.n or 1,), "best_of", "samplers such as best_of search")
    only(body.suffix, (), "suffix", "text is written from left to right")
    prompts: list[Any]
    if isinstance(body.prompt, str):
        prompts = [body.prompt]
    elif body.prompt and isinstance(body.prompt[0], int):
        prompts = [Condition.of({"tokens": list(body.prompt)})]
    else:
        prompts = list(body.prompt)
    if not prompts:
        raise ApiError("prompt is []; expected at least one text", "prompt", "invalid_value")
    limits = body.limits("max_tokens")
    start, n = body.start(), body.n or 1
    return Wanted.of(body, body.model, prompts, n=n, start=start, sampling=limits)


def wanted_chat(body: ChatRequest, modality: Modality) -> Wanted:
    """Return what a body asks for.

    Args:
        body: the body.
        modality: modality of the model, as the model serves it.

    Raises:
        ApiError: the model takes no such conversation.
    """
    condition = condition_of(body.messages, "messages" in modality.accepts)
    limits = body.limits("max_tokens", "max_completion_tokens")
    return Wanted.of(
        body,
        body.model,
        [condition],
        n=body.n or 1,
        start=body.start(),
        sampling=limits,
        param="messages",
    )


class Completions:
    """Shape of the responses of ``/v1/completions``."""

    name, prefix = "text_completion", "cmpl"

    def whole(self, text: str) -> dict[str, Any]:
        """Return what a choice says of its text."""
        return {"text": text}

    def first(self) -> dict[str, Any] | None:
        """Return what a choice of a stream says before its text."""
        return None

    def part(self, text: str) -> dict[str, Any]:
        """Return what a choice of a stream says of a part of its text."""
        return {"text": text}

    def logprobs(self, found: ItemLogprobs, start: int = 0) -> dict[str, Any]:
        """Return log-probabilities of the tokens of a choice.

        Args:
            found: log-probabilities of its tokens.
            start: characters that were given.
        """
        tokens = [token for token in found if token is not None]
        return {
            "tokens": [token.text or "" for token in tokens],
            "token_logprobs": [_number(token.logprob) for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": _offsets(tokens, start),
        }


class Chats(Completions):
    """Shape of the responses of ``/v1/chat/completions``."""

    name, prefix = "chat.completion", "chatcmpl"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def first(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, found: ItemLogprobs, start: int = 0) -> dict[str, Any]:
        def said(text: str, raw: bytes | None, logprob: float) -> dict[str, Any]:
            if raw is None and BROKEN not in text:  # special tokens are spelt
                raw = text.encode()
            numbers = None if raw is None else list(raw)
            return {"token": text, "logprob": _number(logprob), "bytes": numbers}

        content = []
        for t in found:
            if t is not None:
                tops = zip(t.top_texts or (), t.top_bytes or (), t.top, strict=True)
                top = [said(text, raw, x) for text, raw, (_, x) in tops]
                own = said(t.text or "", t.text_bytes, t.logprob)
                content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return log-probabilities by text. Of equal texts of several tokens one keeps its text, that
    of the drawn token first; the others are spelt ``token_id:7``."""
    taken, found = {token.text: token.token_id}, {}
    for text, (token_id, x) in zip(token.top_texts or (), token.top, strict=True):
        own = taken.setdefault(text, token_id) == token_id
        found[text if own else f"token_id:{token_id}"] = _number(x)
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


def _number(logprob: float) -> float:
    """Return a log-probability that JSON can hold: -9999 stands for -inf, as in OpenAI's API."""
    return max(logprob, -9999.0)


async def _answer(
    calls: Calls, body: TextFields, wanted: Wanted, request: Request, shape: Completions
) -> Any:
    """Return the texts, or the stream of their parts."""
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        call = await calls.start(wanted, stream=True)
        first = await call.first(request)
        named = f"{shape.name}.chunk" if isinstance(shape, Chats) else shape.name
        head = {**head, "object": named}
        return event_stream(_events(call, first, body, head, shape))
    only(body.stream_options, (), "stream_options", "nothing streams without stream")
    output = await calls.output(wanted, request)
    finished = await run_in_threadpool(_finish_reasons, calls, body, output)
    logprobs, given = output.logprobs, len(body.prefix or "")
    choices = [
        {
            "index": i,
            **shape.whole(text),
            "finish_reason": finished[i],
            "logprobs": None if logprobs is None else shape.logprobs(logprobs[i], given),
            "gen": item_info(output, i),
        }
        for i, text in enumerate(output.media)
    ]
    counts = await run_in_threadpool(usage, calls, body, output)
    return {**head, "object": shape.name, "choices": choices, "usage": counts}


async def _events(
    call: Call, first: Chunk | None, body: TextFields, head: dict[str, Any], shape: Completions
) -> AsyncIterator[bytes]:
    """Yield the events of a stream: parts of texts, then how each ended."""
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    nothing: dict[str, Any] = {"usage": None} if with_usage else {}

    def said(i: int, what: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": i, **what, "finish_reason": reason, "logprobs": None, **more}
        return event({**head, "choices": [choice], **nothing})

    for i in range(len(call.ticket.request.items)):
        if (opening := shape.first()) is not None:
            yield said(i, opening)
    async for chunk in call.chunks(first):
        yield said(chunk.item.index, shape.part(chunk.media))
    output = await call.output()
    finished = await run_in_threadpool(_finish_reasons, call.calls, body, output)
    for i, reason in enumerate(finished):
        more: dict[str, Any] = {"gen": item_info(output, i)}
        if output.logprobs is not None:
            more["logprobs"] = shape.logprobs(output.logprobs[i], len(body.prefix or ""))
        yield said(i, shape.part(""), reason, **more)
    if with_usage:
        counts = await run_in_threadpool(usage, call.calls, body, output)
        yield event({**head, "choices": [], "usage": counts})
    yield END


def _finish_reasons(calls: Calls, body: TextFields, output: PipelineOutput) -> list[str]:
    """Return why each text ended: ``stop`` at an end or a stop text, or ``length``."""
    pipe = calls.engine.models.pipeline(body.model)
    _, binding, frontend = pipe.bound(output.model)
    ends = {*binding.space.ends, *output.sampling.stop_token_ids}
    reasons: list[str] = []
    for tokens, stats in zip(output.tokens.tolist(), output.stats, strict=True):
        if ends & set(tokens[: stats.tokens]):  # what fills a row behind its limit ends nothing
            reasons.append("stop")
            continue
        text = pipe.decode(output.tokens.new_tensor(tokens), binding.space, frontend)
        reasons.append("stop" if any(s in text for s in output.sampling.stop) else "length")
    return reasons


def usage(calls: Calls, body: TextFields, output: PipelineOutput) -> dict[str, int]:
    """Return the tokens of prompts, each counted once, and of outputs."""
    pipe = calls.engine.models.pipeline(body.model)
    firsts = output.items[:: body.n or 1]
    prompt = sum(pipe.prompt_lengths(firsts, output.spec))
    made = sum(stats.tokens for stats in output.stats)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
