"""``/v1/chat/completions`` and ``/v1/completions``, whole or as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from gen.contracts.condition import Condition
from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.core.tool_calls import Said
from gen.core.versions import gen_version
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, item_info
from gen.serve.api.chat import Message, condition_of
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import MOST_TOKENS, Fields, Name, SamplerFields, Text, only
from gen.serve.api.neutral import NeutralFields
from gen.serve.api.tools import ToolChoice, Tools, ToolUse, chosen, functions_of
from gen.tokenizers.base.text_bytes import BROKEN

MOST, MOST_PROMPTS, MOST_LOGPROBS = 128, 2048, 20
Prompts = Text | Annotated[list[Text], Field(max_length=MOST_PROMPTS)]
TokenIds = Annotated[list[int], Field(max_length=100_000)]
END = b"data: [DONE]\n\n"
VALUE = {"$ref": "#/$defs/value"}
ANY_OBJECT = {  # of response_format json_object
    "type": "object",
    "additionalProperties": VALUE,
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["string", "number", "boolean", "null"]},
                {"type": "array", "items": VALUE},
                {"type": "object", "additionalProperties": VALUE},
            ]
        }
    },
}
DEEPEST_ANY = 5  # values of an object of any kind in each other


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

    def schema_of(self) -> dict[str, Any] | None:
        """Return the schema; None for any text. Raises ``ApiError`` where it is missing."""
        if self.type == "json_object":
            return ANY_OBJECT
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            message = (
                f"response_format is {self.type!r} without a schema; expected"
                ' {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
            raise ApiError(message, "response_format", "missing_parameter")
        return self.json_schema.schema_


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


class ChatRequest(TextFields, NeutralFields):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def sampling(self) -> dict[str, Any]:
        values = {k: v for k, v in super().sampling().items() if k != "logprobs"}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            message = f"top_logprobs is {self.top_logprobs} without logprobs; expected logprobs"
            raise ApiError(message, "top_logprobs", "invalid_value")
        return values

    def tool_use(self, modality: Modality) -> ToolUse | None:
        """Return what the answer may call; None for nothing. Raises ``ApiError``."""
        choice = chosen(self.tool_choice)
        return ToolUse.of(modality, functions_of(self.tools), choice, self.parallel_tool_calls)

    def rule(self, use: ToolUse | None) -> dict[str, Any]:
        """Return the sampling parameter ``structured`` where tools or a response format ask for
        one. Raises ``ApiError`` for two rules."""
        form = self.response_format
        schema = None if form is None else form.schema_of()
        if schema is None and use is None:
            return {}
        param = "response_format" if use is None else "tools"
        if self.structured is not None:
            message = f"structured and {param} are both given; expected one of them"
            raise ApiError(message, param, "invalid_value")
        if use is not None:
            return {"structured": use.rule(schema)}
        depth = {"max_depth": DEEPEST_ANY} if schema is ANY_OBJECT else {}
        return {"structured": {"json_schema": schema, **depth}}


def text_router(calls: Calls) -> APIRouter:
    """Return the routes of texts."""
    router = APIRouter(tags=["text"])

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
        return await _answer(calls, body, wanted, request, Chats(body.tool_use(pipe.modality)))

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
    use = body.tool_use(modality)
    tools = () if use is None else use.tools
    condition = condition_of(body.messages, "messages" in modality.accepts, tools)
    limits = body.limits("max_tokens", "max_completion_tokens") | body.rule(use)
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

    def head(self) -> dict[str, Any]:
        """Return what every response says beside its choices."""
        return {"system_fingerprint": f"gen-{gen_version()}"}

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """Return what a choice says of its text, and of the reason that it ended."""
        return {"text": text, "finish_reason": reason}

    def stream(self) -> TextParts:
        """Return what writes the parts of a choice of a stream."""
        return TextParts()

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


class TextParts:
    """Writer of the parts of one choice of ``/v1/completions``."""

    def first(self) -> list[dict[str, Any]]:
        """Return what comes before the text."""
        return []

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

    def stream(self) -> TextParts:
        return ChatParts() if self.use is None else CallParts(self.use)

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
        **shape.head(),
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
            **shape.whole(text, finished[i]),
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

    def said(i: int, what: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": i, "finish_reason": None, "logprobs": None, **what, **more}
        return event({**head, "choices": [choice], **nothing})

    writers = [shape.stream() for _ in call.ticket.request.items]
    for i, writer in enumerate(writers):
        for opening in writer.first():
            yield said(i, opening)
    async for chunk in call.chunks(first):
        for part in writers[chunk.item.index].part(chunk.media):
            yield said(chunk.item.index, part)
    output = await call.output()
    finished = await run_in_threadpool(_finish_reasons, call.calls, body, output)
    for i, reason in enumerate(finished):
        more: dict[str, Any] = {"gen": item_info(output, i)}
        if output.logprobs is not None:
            more["logprobs"] = shape.logprobs(output.logprobs[i], len(body.prefix or ""))
        *rest, last = writers[i].last(reason)
        for part in rest:
            yield said(i, part)
        yield said(i, last, **more)
    if with_usage:
        counts = await run_in_threadpool(usage, call.calls, body, output)
        yield event({**head, "choices": [], "usage": counts})
    yield END


def _finish_reasons(calls: Calls, body: TextFields, output: PipelineOutput) -> list[str]:
    """Return why each text ended: ``stop`` at an end, a stop text or the end of a structure, or
    ``length``."""
    pipe = calls.engine.models.pipeline(body.model)
    _, binding, frontend = pipe.bound(output.model)
    ends = {*binding.space.ends, *output.sampling.stop_token_ids}
    reasons: list[str] = []
    for tokens, stats in zip(output.tokens.tolist(), output.stats, strict=True):
        if ends & set(tokens[: stats.tokens]):  # what fills a row behind its limit ends nothing
            reasons.append("stop")
            continue
        text = pipe.decode(output.tokens.new_tensor(tokens), binding.space, frontend)
        is_over = any(s in text for s in output.sampling.stop)
        is_over = is_over or (is_json(output.sampling.structured) and is_whole_json(text))
        reasons.append("stop" if is_over else "length")
    return reasons


def is_json(rule: Mapping[str, Any] | None) -> bool:
    """Return whether a rule asks for JSON."""
    return rule is not None and ("json_schema" in rule or rule.get("text") is not None)


def is_whole_json(text: str) -> bool:
    """Return whether a text is a JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def usage(calls: Calls, body: TextFields, output: PipelineOutput) -> dict[str, Any]:
    """Return the tokens of prompts, each counted once, and of outputs."""
    pipe = calls.engine.models.pipeline(body.model)
    firsts = output.items[:: body.n or 1]
    prompt = sum(pipe.prompt_lengths(firsts, output.spec))
    made = sum(stats.tokens for stats in output.stats)
    return usage_of(prompt, made)


def usage_of(prompt: int, made: int) -> dict[str, Any]:
    """Return tokens of prompts and of outputs as OpenAI's API counts them."""
    read = {"cached_tokens": 0, "audio_tokens": 0}
    kinds = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": read,
        "completion_tokens_details": {f"{kind}_tokens": 0 for kind in kinds},
    }
