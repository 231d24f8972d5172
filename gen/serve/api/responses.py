"""``/v1/responses``: answers of conversations as items, translated to and from chats.

What a response is made from goes through ``wanted_chat``, as ``/v1/chat/completions`` does. Answers
are kept in the process, a bounded number of them, for ``previous_response_id``.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool

from gen.core.errors import GenError, shown
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.bodies import BodyRoute, validated
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, item_info
from gen.serve.api.errors import ApiError, as_api_error, of_validation
from gen.serve.api.fields import MOST_LOGPROBS, Fields, Name, SamplerFields, Text, only
from gen.serve.api.neutral import TAKEN
from gen.serve.api.response_items import TextOrItems, messages_of, plain_items
from gen.serve.api.response_output import Output
from gen.serve.api.shapes import Chats
from gen.serve.api.texts import ChatRequest, StreamOptions, finish_reasons, usage, wanted_chat
from gen.serve.api.tools import MOST_TOOLS, FunctionName

LOGPROBS = "message.output_text.logprobs"
MOST_BYTES = 64_000_000  # of the conversations of kept answers
# fields of a chat, and those of a response that they come from
OF_CHAT = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}
# values that change nothing, and why there are no others
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), "there are none"),
    "background": ((False,), "answers are made while their client waits"),
    "background_options": ((), "answers are made while their client waits"),
    "context_management": (([],), "conversations are taken as they are"),
    "conversation": ((), "conversations go on by previous_response_id"),
    "image": ((), "answers are texts"),
    "max_tool_calls": ((), "there are no built-in tools"),
    "moderation": ((), "nothing is moderated"),
    "prompt": ((), "no templates of prompts are kept"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "truncation": (("disabled",), "conversations are taken as they are"),
}


class FunctionTool(Fields):
    """Function that an answer may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object.")
    strict: bool | None = None


class FunctionChoice(Fields):
    """Choice of the one function that is called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Fields):
    """Form of a text."""

    type: Literal["text", "json_schema", "json_object"]
    name: Name = "schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Fields):
    """Form of the texts of an answer."""

    format: TextFormat | None = None
    verbosity: Any = None


class Reasoning(Fields):
    """Options of models that think aloud."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class ResponseRequest(SamplerFields):
    """Body of ``/v1/responses``."""

    model: Name = Field("text", description="Id of a model that writes text.")
    input: TextOrItems
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = Field(None, description="Keep the answer (true) for later requests.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Name] | None = Field(None, max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    metadata: dict[Name, str] | None = Field(None, max_length=16)
    reasoning: Reasoning | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    service_tier: Any = None
    truncation: Any = None
    prompt_cache_key: Name | None = Field(None, description=TAKEN)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=TAKEN)
    prompt_cache_retention: Name | None = Field(None, description=TAKEN)

    @model_validator(mode="after")
    def _says_nothing_else(self) -> ResponseRequest:
        for name, (allowed, why) in NEUTRAL.items():
            only(getattr(self, name), allowed, name, why)
        if self.reasoning is not None:
            only(self.reasoning.effort, ("none",), "reasoning.effort", "models think as they do")
            for name in ("summary", "generate_summary"):
                value = getattr(self.reasoning, name)
                only(value, ("auto",), f"reasoning.{name}", "there are no thoughts to sum up")
        if self.text is not None:
            why = "models write as much as they do"
            only(self.text.verbosity, ("medium",), "text.verbosity", why)
        if not self.stream:
            only(self.stream_options, (), "stream_options", "nothing streams without stream")
        return self

    def chat(self, conversation: list[dict[str, Any]]) -> ChatRequest:
        """Return the chat that makes the answer. Raises ``ApiError``.

        Args:
            conversation: items of the whole conversation.
        """
        messages = messages_of(conversation)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        values = {name: getattr(self, name) for name in SamplerFields.model_fields}
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        functions = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        if self.include and LOGPROBS in self.include:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        elif self.top_logprobs:
            message = f"top_logprobs is {self.top_logprobs}; expected {LOGPROBS!r} in include"
            raise ApiError(message, "top_logprobs", "invalid_value")
        values |= {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [{"type": "function", "function": f} for f in functions],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        try:
            return validated(ChatRequest, values)
        except RequestValidationError as error:
            raise of_validation(error).renamed(OF_CHAT) from None

    def _format(self) -> dict[str, Any] | None:
        """Return the form of the text as a chat has it."""
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_ is None:
            message = "text.format.schema is missing; expected a JSON schema"
            raise ApiError(message, "text.format.schema", "missing_parameter")
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}

    def shown(self) -> dict[str, Any]:
        """Return what a response repeats of its request."""
        tools = [tool.model_dump() for tool in self.tools or ()]
        form = None if self.text is None else self.text.format
        said = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        if form is not None and form.type != "json_schema":
            said = {"type": form.type}
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = choice.model_dump()
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": self.temperature,
            "text": {"format": said, "verbosity": "medium"},
            "tool_choice": "auto" if choice is None else choice,
            "tools": tools,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


@dataclass(frozen=True)
class Kept:
    """Answer that is kept.

    Attributes:
        response: the answer.
        conversation: items that it answers, and its own.
        nbytes: size of both as JSON.
    """

    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    nbytes: int

    @classmethod
    def of(cls, response: dict[str, Any], conversation: list[dict[str, Any]]) -> Kept:
        """Return an answer to keep, measured."""
        return cls(response, conversation, len(json.dumps([response, conversation])))


class Answers:
    """Answers that are kept in this process; the oldest go first.

    Args:
        most: number of answers.
    """

    def __init__(self, most: int):
        self.most, self.nbytes = most, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def get(self, name: str, param: str = "response_id") -> Kept:
        """Return an answer. Raises ``ApiError`` for one that is not kept."""
        if name in self._kept:
            return self._kept[name]
        message = f"there is no response {shown(name)}; expected one that was stored and is kept"
        if param == "response_id":
            raise ApiError(message, param, "not_found", 404, "not_found_error")
        raise ApiError(message, param, "previous_response_not_found")

    def put(self, kept: Kept) -> None:
        """Keep an answer, and drop the oldest ones where there are too many."""
        self._kept[kept.response["id"]] = kept
        self.nbytes += kept.nbytes
        while len(self._kept) > self.most or self.nbytes > MOST_BYTES:
            self.drop(next(iter(self._kept)))

    def drop(self, name: str) -> None:
        """Forget an answer. Raises ``ApiError`` for one that is not kept."""
        self.nbytes -= self.get(name).nbytes
        del self._kept[name]


def response_router(calls: Calls) -> APIRouter:
    """Return the routes of responses."""
    router = APIRouter(tags=["text"], route_class=BodyRoute)
    answers = Answers(calls.settings.kept_responses)

    @router.post("/v1/responses")
    async def create(body: ResponseRequest, request: Request) -> Any:
        """Answer a conversation with texts and calls of functions."""
        calls.served(body.model, ("text",), "/v1/responses")
        if body.store and not answers.most:
            raise ApiError(
                "store is true, and this server keeps no responses", "store", "unsupported_value"
            )
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = answers.get(body.previous_response_id, "previous_response_id").conversation
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        answer = await run_in_threadpool(Answer, calls, body, before, pipe.modality)
        keep = answers if body.store is not False and answers.most else None
        if not body.stream:
            return await answer.whole(request, keep)
        call = await calls.start(answer.wanted, stream=True)
        return event_stream(answer.events(call, await call.first(request), keep))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> dict[str, Any]:
        """Return an answer that is kept."""
        return answers.get(response_id).response

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        """Forget an answer."""
        answers.drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


class Answer:
    """Answer that is being made.

    Args:
        calls: door to the engine.
        body: what is asked for.
        before: items of the conversation so far.
        modality: modality of the model, as the model serves it.

    Raises:
        ApiError: the model takes no such conversation.
    """

    def __init__(self, calls: Calls, body: ResponseRequest, before: list[Any], modality: Any):
        self.calls, self.body = calls, body
        self.conversation = [*before, *plain_items(body.input)]
        self.chat = body.chat(self.conversation)
        try:
            self.wanted: Wanted = wanted_chat(self.chat, modality)
            use = self.chat.tool_use(modality)
        except GenError as error:
            raise as_api_error(error, "input").renamed(OF_CHAT) from None
        rule = self.wanted.rule_param
        self.wanted.param, self.wanted.rule_param = "input", OF_CHAT.get(rule, rule)
        self.shape, self.output = Chats(use), Output(use)
        self.response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "store": body.store is not False and calls.settings.kept_responses > 0,
            "usage": None,
            **body.shown(),
        }

    async def whole(self, request: Request, keep: Answers | None) -> dict[str, Any]:
        """Return the response."""
        made = await self.calls.output(self.wanted, request)
        self.output.part(made.media[0])
        await self._finish(made, keep)
        return self.response

    async def events(
        self, call: Call, first: Chunk | None, keep: Answers | None
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; the last one has the response."""
        number = 0

        def said(what: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return event({**what, "sequence_number": number - 1}, named=True)

        for name in ("created", "in_progress"):
            yield said({"type": f"response.{name}", "response": self.response})
        try:
            async for chunk in call.chunks(first):
                for what in self.output.part(chunk.media):
                    yield said(what)
            for what in await self._finish(await call.output(), keep):
                yield said(what)
        except Exception as problem:
            error = as_api_error(problem)
            failure = {"code": "server_error", "message": str(error)}
            for item in self.output.items[-1:]:
                item["status"] = "incomplete"
            self.response |= {"status": "failed", "error": failure, "output": self.output.items}
        kind = f"response.{self.response['status']}"
        yield said({"type": kind, "response": self.response})

    async def _finish(self, made: PipelineOutput, keep: Answers | None) -> list[dict[str, Any]]:
        """Complete the response, and keep it; return what a stream says before it."""
        (reason,) = await run_in_threadpool(finish_reasons, self.calls, self.chat, made)
        logprobs = None
        if made.logprobs is not None:
            logprobs = self.shape.logprobs(made.logprobs[0])["content"]
            for said in (top for token in logprobs for top in (token, *token["top_logprobs"])):
                said["bytes"] = said["bytes"] or []  # which is no null here
        events = self.output.finish(reason == "stop", logprobs)
        counts = await run_in_threadpool(usage, self.calls, self.chat, made)
        items = self.output.items
        is_whole = items[-1]["status"] == "completed"
        self.response |= {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "completed_at": int(time.time()) if is_whole else None,
            "output": items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            "gen": item_info(made, 0),
        }
        if keep is not None:
            said = [*self.conversation, *items]
            keep.put(await run_in_threadpool(Kept.of, self.response, said))
        return events
