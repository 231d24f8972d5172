"""Requests of an engine, awaited by the event loop of the server.

A client that leaves cancels its request: while it waits for a whole answer (``left_by``), and
while a response streams (``Call.chunks``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from gen.contracts.condition import Condition
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.engine.engine import Engine
from gen.engine.models import ServedModel
from gen.engine.ticket import Compute, DeadlineExceeded, OnStep, Ticket
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.errors import ApiError, as_api_error
from gen.serve.api.fields import SamplerFields
from gen.serve.metrics import Metrics
from gen.serve.settings import Settings

MOST_TEXT = 2_000_000  # characters of the prompts of a request
GRACE = 2.0  # seconds that an engine has to notice a deadline itself


@dataclass
class Wanted:
    """What an endpoint asks of the engine.

    Attributes:
        model: id of a model.
        prompts: prompts or conditions.
        sampler: the sampler.
        n: outputs per prompt.
        seed: seed of the first output of every prompt.
        sampling: sampling parameters.
        start: edit, continuation or length to start from.
        deadline: seconds; None takes that of the server.
        previews: previews of each image.
        param: field of the request that holds the prompt, for messages.
        compute: what is computed of the prompts instead of running the sampler.
        rule_param: field that holds the rule of structured output, for messages.
    """

    model: str
    prompts: list[Any]
    sampler: Any = None
    n: int = 1
    seed: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    start: EditSpec = EditSpec()
    deadline: float | None = None
    previews: int = 0
    param: str = "prompt"
    compute: Compute | None = None
    rule_param: str = "structured"

    @classmethod
    def of(cls, body: SamplerFields, model: str, prompts: list[Any], **more: Any) -> Wanted:
        """Return what a body asks for; ``more`` are further attributes."""
        sampling = {**body.sampling(), **more.pop("sampling", {})}
        return cls(
            model,
            prompts,
            body.chosen_sampler(),
            seed=body.seed,
            deadline=body.deadline,
            sampling=sampling,
            **more,
        )


class Calls:
    """Door of the endpoints to the engine.

    Args:
        engine: the engine.
        settings: settings of the server.
        metrics: where calls are counted.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics):
        self.engine, self.settings, self.metrics = engine, settings, metrics

    def served(self, model: str, kinds: Iterable[str], endpoint: str) -> ServedModel:
        """Return a served model of one of some kinds.

        Args:
            model: id of the model.
            kinds: names of modalities, or kinds of their media.
            endpoint: the path, for the message.

        Raises:
            ApiError: there is no such model (404), or it makes other media.
        """
        try:
            found = self.engine.models.get(model)
        except GenError as error:
            raise ApiError(str(error), "model", "model_not_found", 404) from None
        kind = registry.get("modality", found.modality).media_kind
        if not {found.modality, kind} & set(kinds):
            raise ApiError(
                f"model {model!r} makes {found.modality}, which {endpoint} does not return;"
                f" expected one of {', '.join(self.named(kinds))}",
                "model",
                "model_of_another_endpoint",
            )
        return found

    def named(self, kinds: Iterable[str]) -> list[str]:
        """List the ids of the models of some kinds."""
        table = registry.table("modality")
        return [
            m.id
            for m in self.engine.models.list()
            if {m.modality, table[m.modality].media_kind} & set(kinds)
        ]

    async def start(
        self, wanted: Wanted, stream: bool = False, on_step: OnStep | None = None
    ) -> Call:
        """Hand a request to the engine.

        Args:
            wanted: what is asked for.
            stream: whether ``Call.chunks`` yields parts.
            on_step: receiver of forward passes.

        Raises:
            ApiError: the engine does not take it.
        """
        most = self.settings.deadline
        if wanted.deadline is not None and wanted.deadline > most:
            message = f"deadline is {wanted.deadline:g}; expected at most {most:g} seconds"
            raise ApiError(message, "deadline", "invalid_value")
        items = wanted.n * len(wanted.prompts)
        if items > self.engine.max_waiting:
            raise ApiError(
                f"the request asks for {items} outputs; expected at most {self.engine.max_waiting}",
                "n",
                "invalid_value",
            )
        deadline = most if wanted.deadline is None else wanted.deadline
        call = Call(self, wanted, deadline)
        await run_in_threadpool(call.submit, asyncio.get_running_loop(), stream, on_step)
        return call

    async def output(self, wanted: Wanted, request: Request) -> Any:
        """Return the output of a request, or what it computes; it is cancelled when the client
        leaves."""
        call = await self.start(wanted)
        async with call.left_by(request):
            return await call.output()


class Call:
    """One request of the engine.

    Args:
        calls: the door that it came through.
        wanted: what is asked for.
        deadline: seconds after which it fails.
    """

    def __init__(self, calls: Calls, wanted: Wanted, deadline: float):
        self.calls, self.wanted, self.deadline = calls, wanted, deadline
        self.ticket: Ticket
        self.parts: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.done = asyncio.Event()

    def submit(self, loop: asyncio.AbstractEventLoop, stream: bool, on_step: OnStep | None) -> None:
        """Submit it, in a thread, since models may be read. Raises ``ApiError``."""

        def tell(function: Callable[..., object], *args: object) -> None:
            try:
                loop.call_soon_threadsafe(function, *args)
            except RuntimeError:
                pass  # the loop ended first, with the server

        def on_chunk(chunk: Chunk) -> None:
            tell(self.parts.put_nowait, chunk)

        def over(ticket: Ticket) -> None:
            self.calls.metrics.observe(ticket)
            tell(self.parts.put_nowait, None)
            tell(self.done.set)

        wanted = self.wanted
        if (length := text_length(wanted.prompts)) > MOST_TEXT:
            message = f"{wanted.param} has {length} characters; expected at most {MOST_TEXT}"
            raise ApiError(message, wanted.param, "invalid_value")
        try:
            self.ticket = self.calls.engine.submit(
                wanted.model,
                wanted.prompts,
                wanted.sampler,
                num_samples=wanted.n,
                seed=wanted.seed,
                start=wanted.start,
                on_chunk=on_chunk if stream else None,
                on_step=on_step,
                partial_images=wanted.previews,
                deadline=self.deadline,
                compute=wanted.compute,
                **wanted.sampling,
            )
        except Exception as error:
            raise self._refusal(error) from error
        self.ticket.add_done_callback(over)

    async def output(self) -> Any:
        """Wait for the output. Raises ``ApiError`` for its error."""
        try:
            async with asyncio.timeout(self.deadline + GRACE):
                await self.done.wait()
            return self.ticket.result(0)
        except TimeoutError:
            raise self._late() from None
        except DeadlineExceeded:
            raise self._late() from None
        except GenError as error:
            raise self._refusal(error) from None
        finally:
            self.ticket.cancel()

    def _refusal(self, error: Exception) -> ApiError:
        """Return an error of the engine as one about a field of the request."""
        found = as_api_error(error, self.wanted.param)
        if found.param == "structured":
            found.param = self.wanted.rule_param
        return found

    async def first(self, request: Request) -> Chunk | None:
        """Wait for the first part, or for the end of a request without parts.

        What is wrong with a request is known then: its error is one of HTTP and not of a stream.

        Raises:
            ApiError: the request failed before its first part.
        """
        async with self.left_by(request):
            chunk = await self._next()
            if chunk is None:
                await self.output()
            return chunk

    async def chunks(self, first: Chunk | None) -> AsyncIterator[Chunk]:
        """Yield parts until the end; ``first`` is the one that came already. A reader who leaves
        cancels the request."""
        try:
            chunk = first
            while chunk is not None:
                yield chunk
                chunk = await self._next()
        finally:
            if not self.ticket.is_over:
                self.ticket.cancel()

    async def _next(self) -> Chunk | None:
        """Return the next part, None at the end."""
        left = self.ticket.submitted + self.deadline + GRACE - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(left, 0.0)):
                return await self.parts.get()
        except TimeoutError:
            self.ticket.cancel()
            raise self._late() from None

    def _late(self) -> ApiError:
        """Return the error of a missed deadline: the client's own (408), or the server's (504)."""
        message = f"the request was not done within {self.deadline:g} seconds"
        error = as_api_error(DeadlineExceeded(message))
        error.status = 504 if self.wanted.deadline is None else 408
        return error

    @asynccontextmanager
    async def left_by(self, request: Request) -> AsyncIterator[None]:
        """Cancel the request when the client of an HTTP request leaves."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.ticket.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except BaseException:
            self.ticket.cancel()
            raise
        finally:
            watching.cancel()


def text_length(prompts: Iterable[Any]) -> int:
    """Return the characters of all prompts, which become tokens before a model sees any."""
    conditions = [prompt for prompt in prompts if isinstance(prompt, Condition)]
    turns = sum(len(repr(prompt.messages)) for prompt in conditions if prompt.messages)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return turns + sum(map(len, texts)) + sum(len(prompt.text or "") for prompt in conditions)


def item_info(output: PipelineOutput, i: int) -> dict[str, Any]:
    """Return what a response says about an item beside its media, under ``gen``."""
    stats, model = output.stats[i], Path(output.model)
    return {
        "seed": output.items[i].seed,
        "nfe": stats.nfe,
        "guarantee": output.guarantee,
        "model": model.name if model.is_absolute() else output.model,  # no path of this machine
        "sampler": output.spec["name"],
        "tokens": stats.tokens,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "seconds": round(stats.seconds, 6),
    }


def info_headers(output: PipelineOutput, i: int = 0) -> dict[str, str]:
    """Return ``item_info`` as headers of a binary body."""
    info = {k: v for k, v in item_info(output, i).items() if v is not None}
    return {f"x-gen-{k.replace('_', '-')}": str(v) for k, v in info.items()}


def event(data: Mapping[str, Any], named: bool = False) -> bytes:
    """Return a server-sent event; ``named``: its type is its name too."""
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def event_stream(events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None):
    """Return a response of server-sent events. An error in between is the last event."""

    async def safe() -> AsyncIterator[bytes]:
        try:
            async for part in events:
                yield part
        except Exception as error:
            yield event(as_api_error(error).body)

    said = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})}
    return StreamingResponse(safe(), media_type="text/event-stream", headers=said)
