"""``/v1/chat/completions`` and ``/v1/completions``, whole or as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.core.sampling_params import SamplingParams
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.streaming import Chunk
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, item_info
from gen.serve.api.chat import Message, condition_of
from gen.serve.api.echo import Echo, listed, no_tokens, raw, scoring, usage_details
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import (
    MOST_LOGPROBS,
    MOST_TOKENS,
    Fields,
    Name,
    Prompts,
    SamplerFields,
    Text,
    only,
)
from gen.serve.api.neutral import NeutralFields
from gen.serve.api.shapes import Chats, Completions
from gen.serve.api.tools import ToolFields, ToolUse

MOST = 128
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
DEEPEST_ANY = 4  # values of an object of any kind in each other


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

    prompt: Prompts
    max_tokens: int | None = Field(None, description="0 makes none, such as to score a prompt.")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Text | None = None

    def echoed(self, pipe: Pipeline) -> Echo:
        """Return the prompts that the texts begin with."""
        if not self.echo:
            return Echo()
        return Echo.of(listed(self.prompt), pipe.frontend(), self.n or 1)


class ChatRequest(TextFields, ToolFields, NeutralFields):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None

    def sampling(self) -> dict[str, Any]:
        values = {k: v for k, v in super().sampling().items() if k != "logprobs"}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            message = f"top_logprobs is {self.top_logprobs} without logprobs; expected logprobs"
            raise ApiError(message, "top_logprobs", "invalid_value")
        return values

    def rule_param(self, use: ToolUse | None) -> str:
        """Return the field that the rule of the answer comes from."""
        if use is not None:
            return "tools"
        return "structured" if self.response_format is None else "response_format"

    def rule(self, use: ToolUse | None) -> dict[str, Any]:
        """Return the sampling parameter ``structured`` where tools or a response format ask for
        one. Raises ``ApiError`` for two rules."""
        form, param = self.response_format, self.rule_param(use)
        schema = None if form is None else form.schema_of()
        if schema is None and use is None:
            return {}
        if self.structured is not None:
            message = f"structured and {param} are both given; expected one of them"
            raise ApiError(message, param, "invalid_value")
        if use is not None:
            return {"structured": use.rule(schema)}
        depth = {"max_depth": DEEPEST_ANY} if schema is ANY_OBJECT else {}
        return {"structured": {"json_schema": schema, "engine": "auto", **depth}}


def text_router(calls: Calls) -> APIRouter:
    """Return the routes of texts."""
    router = APIRouter(tags=["text"], route_class=BodyRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Write what follows a prompt, which goes into no chat template."""
        calls.served(body.model, ("text",), "/v1/completions")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_completion, body, pipe.modality)
        echo = await run_in_threadpool(body.echoed, pipe)
        if body.echo and body.logprobs is not None:
            scored = replace(wanted, n=1, compute=scoring(body.logprobs))
            echo = replace(echo, logprobs=await calls.output(scored, request))
        return await _answer(calls, body, wanted, request, Completions(echo))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        """Answer a conversation."""
        calls.served(body.model, ("text",), "/v1/chat/completions")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_chat, body, pipe.modality)
        return await _answer(calls, body, wanted, request, Chats(body.tool_use(pipe.modality)))

    return router


def wanted_completion(body: CompletionRequest, modality: Modality) -> Wanted:
    """Return what a body asks for.

    Args:
        body: the body.
        modality: modality of the model, as the model serves it.

    Raises:
        ApiError: no model of gen can do it.
    """
    only(body.best_of, (body.n or 1,), "best_of", "samplers such as best_of search")
    only(body.suffix, ("",), "suffix", "text is written from left to right")
    if body.echo:
        only(body.prefix, ("",), "prefix", "echo puts the prompt before the output")
    prompts: list[Any] = [raw(prompt, modality) for prompt in listed(body.prompt)]
    is_empty = body.max_tokens == 0
    limits = {"max_new_tokens": 1} if is_empty else body.limits("max_tokens")
    start, n = body.start(), body.n or 1
    compute = no_tokens if is_empty else None
    return Wanted.of(body, body.model, prompts, n=n, start=start, sampling=limits, compute=compute)


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
        rule_param=body.rule_param(use),
    )


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
    output = shape.echo.before(await calls.output(wanted, request))
    finished = await run_in_threadpool(finish_reasons, calls, body, output)
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

    writers = [shape.stream(i) for i in range(len(call.ticket.request.items))]
    for i, writer in enumerate(writers):
        for opening in writer.first():
            yield said(i, opening)
    async for chunk in call.chunks(first):
        for part in writers[chunk.item.index].part(chunk.media):
            yield said(chunk.item.index, part)
    output = shape.echo.before(await call.output())
    finished = await run_in_threadpool(finish_reasons, call.calls, body, output)
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


def finish_reasons(calls: Calls, body: TextFields, output: PipelineOutput) -> list[str]:
    """Return why each text ended (``finish_reason``)."""
    pipe = calls.engine.models.pipeline(body.model)
    rows = zip(output.tokens, output.stats, strict=True)
    return [
        finish_reason(pipe, output.model, output.sampling, tokens, stats.tokens)
        for tokens, stats in rows
    ]


def finish_reason(
    pipe: Pipeline, model: str, sampling: SamplingParams, tokens: Tensor, count: int
) -> str:
    """Return why a text ended: ``stop`` at an end, a stop text or the end of a structure, or
    ``length``.

    Args:
        pipe: the pipeline.
        model: name of the model that wrote the text.
        sampling: sampling parameters.
        tokens: its tokens, long [T].
        count: number of those that are not behind its limit.
    """
    _, binding, frontend = pipe.bound(model)
    if {*binding.space.ends, *sampling.stop_token_ids} & set(tokens[:count].tolist()):
        return "stop"
    text = pipe.decode(tokens, binding.space, frontend)
    is_over = any(stop in text for stop in sampling.stop)
    is_over = is_over or (is_json(sampling.structured) and is_whole_json(text))
    return "stop" if is_over else "length"


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
    return usage_details(prompt, made)
