"""Events of a call of the page: passes, parts of media, and the result.

The engine's threads put what happened into a queue and go on; it becomes plain data in the thread
of the reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from math import prod
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from gen.contracts.frontend import StreamingFrontend, Vocabulary
from gen.core.registry import registry
from gen.core.token_space import GUARANTEES
from gen.engine.engine import Engine
from gen.engine.ticket import Cancelled, ItemStep, Ticket
from gen.gallery.trace import layout
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.errors import as_api_error
from gen.serve.api.tools import ToolUse
from gen.serve.live.media import as_file, part, whole
from gen.serve.live.request import LiveRequest
from gen.tokenizers.base.text_bytes import TextBytes

Event = tuple[str, dict[str, Any]]


class Events:
    """Events of one call.

    Attributes:
        id: name of the call, which ``POST /live/cancel`` takes.
        ticket: ticket of the call.

    Args:
        engine: the engine.
        request: the call.
        loop: event loop of the reader.
    """

    def __init__(self, engine: Engine, request: LiveRequest, loop: asyncio.AbstractEventLoop):
        self.id = secrets.token_urlsafe(16)
        self.ticket: Ticket
        self.request, self._loop = request, loop
        self._pipe = engine.models.pipeline(request.model)
        self._queue: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
        self._laid_out: set[int] = set()
        self._grid: tuple[int, ...] = ()
        self._vocabulary: Vocabulary | None = None
        self._use: ToolUse | None = None
        self._began: float | None = None  # time of the first pass
        self._last = 0.0  # time of the last pass

    @classmethod
    def submit(
        cls,
        engine: Engine,
        request: LiveRequest,
        loop: asyncio.AbstractEventLoop,
        deadline: float | None = None,
    ) -> Events:
        """Hand a call to an engine.

        Args:
            engine: the engine.
            request: the call.
            loop: event loop of the reader.
            deadline: seconds after which the call fails; None sets no limit.

        Raises:
            GenError: the call cannot be done.
        """
        events = cls(engine, request, loop)
        sampler = None if request.sampler is None else dict(request.sampler)
        streams = events._learn(sampler)
        modality = events._pipe.modality
        events._use = request.use(modality)
        events.ticket = engine.submit(
            request.model,
            request.condition(modality),
            sampler,
            num_samples=request.num_samples,
            seed=request.seed,
            start=request.start(engine),
            on_chunk=events._put if streams else None,
            on_step=events._put,
            partial_images=request.partial_images,
            deadline=deadline,
            **request.controls(modality),
        )
        events.ticket.add_done_callback(events._put)
        return events

    def _learn(self, sampler: dict[str, Any] | None) -> bool:
        """Learn of the model how its canvas is drawn; return True where its media stream."""
        pipe = self._pipe
        name = pipe.model_name(pipe.defaults.complete_sampler(sampler))
        binding, frontend = pipe.binding(name)
        self._grid = tuple(binding.space.grid)
        if isinstance(frontend, TextBytes) and binding.space.kind == "codes":
            self._vocabulary = pipe.vocabulary(name)
        kinds = (StreamingFrontend, TextBytes)
        return isinstance(frontend, kinds) or pipe.modality.media_kind == "image"

    def _put(self, news: ItemStep | Chunk | Ticket) -> None:
        """Take news in a thread of the engine."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (time.monotonic(), news))
        except RuntimeError:  # the loop of the reader is closed
            self.ticket.cancel()

    async def read(self, silence: float) -> AsyncIterator[Event | None]:
        """Yield events until the call is over; None after so many seconds without one."""
        yield "start", self._start()
        while True:
            try:
                at, news = await asyncio.wait_for(self._queue.get(), silence)
            except TimeoutError:
                yield None
                continue
            if isinstance(news, ItemStep):
                if news.item.index not in self._laid_out:
                    self._laid_out.add(news.item.index)
                    yield "canvas", self._canvas(news)
                yield "step", self._step(at, news)
            elif isinstance(news, Chunk):
                shown = await run_in_threadpool(part, self._pipe.modality, news.media)
                yield "part", {"item": news.item.index, "preview": news.preview, **shown}
            else:
                yield await run_in_threadpool(self._end, news)
                return

    def _start(self) -> dict[str, Any]:
        request = self.ticket.request
        sampler = request.sampler
        guarantee = self._pipe.guarantee(sampler)
        return {
            "id": self.id,
            "items": [{"index": i.index, "seed": i.seed} for i in request.items],
            "sampler": request.spec["name"],
            "guarantee": guarantee,
            "reference": sampler.reference,
            "promise": GUARANTEES[guarantee],
            "drafts": registry.get("protocol", sampler.protocol).left_to_right
            or sampler.guarantee != "approximate",
        }

    def _canvas(self, step: ItemStep) -> dict[str, Any]:
        length, modality = len(step.known), self._pipe.modality
        frames, rest = divmod(length, prod(self._grid[1:]))  # a prompt may decide the first axis
        grid = (frames, *self._grid[1:]) if self._grid and not rest else None
        kind = "image" if modality.media_kind in ("image", "video") else "data"
        plan = layout(grid, length, "the canvas", kind)
        return {
            "item": step.item.index,
            "length": length,
            "planes": plan.planes,
            "rows": plan.rows,
            "columns": plan.columns,
            "across": plan.across,
            "turned": plan.turned,
        }

    def _step(self, at: float, step: ItemStep) -> dict[str, Any]:
        self._began = at if self._began is None else self._began
        self._last = at
        told: dict[str, Any] = {
            "item": step.item.index,
            "nfe": step.nfe,
            "seconds": round(at - self._began, 4),
            "known": int(np.count_nonzero(step.known)),
            "window": _ranges(step.window),
            "accepted": list(step.accepted),
            "committed": list(step.committed),
            "removed": list(step.removed),
        }
        if step.tokens is not None and step.tokens.ndim == 1:
            told["tokens"] = [int(step.tokens[p]) for p in step.committed]
            if self._vocabulary is not None:
                told["texts"] = [self._text(p, int(step.tokens[p])) for p in step.committed]
        return told

    def _text(self, position: int, token: int) -> str:
        """Return the text of a token; empty where it is none."""
        assert self._vocabulary is not None, "tokens of other media have no text"
        table = self._vocabulary.later if position else self._vocabulary.first
        content = table[token] if token < len(table) else None
        return "" if content is None else content.decode(errors="replace")

    def _end(self, ticket: Ticket) -> Event:
        try:
            output = ticket.result(0)
            items = [self._item(output, i) for i in range(len(output))]
        except Cancelled as error:
            return "cancelled", {"message": str(error)}
        except Exception as error:  # a fault of the program goes into its log in full
            refused = as_api_error(error, "prompt")
            is_rule = refused.param == "structured" and self._use is not None
            param = "tools" if is_rule else refused.param
            return "error", {"message": str(refused), "param": param}
        # items of a call wait for rows one after the other, where there are fewer rows than items
        passes = 0.0 if self._began is None else self._last - self._began
        seconds = max(passes, *(stats.seconds for stats in output.stats))
        return "result", {
            "model": output.model,
            "seconds": round(seconds, 4),
            "guarantee": output.guarantee,
            "items": items,
        }

    def _item(self, output: PipelineOutput, i: int) -> dict[str, Any]:
        """Return an output with its cost and a digest of its tokens."""
        stats, modality = output.stats[i], self._pipe.modality
        tokens = output.tokens[i].contiguous().numpy().tobytes()
        item: dict[str, Any] = {
            "seed": output.items[i].seed,
            "nfe": stats.nfe,
            "draft_nfe": stats.draft_nfe,
            "tokens": stats.tokens,
            "acceptance": stats.draft_acceptance_rate,
            "digest": hashlib.sha256(tokens).hexdigest()[:16],
            "media": whole(modality, output.media[i]),
        }
        if self._use is not None:
            content, calls, _ = self._use.read(output.media[i])
            item |= {"content": content, "calls": calls}
        if modality.kept and item["media"]["kind"] == "frames":
            item["kept"] = as_file(modality, output.media[i], kept=True)
        return item


def _ranges(positions: list[int]) -> list[list[int]]:
    """Join positions to ranges: ``[3, 4, 5, 9]`` -> ``[[3, 5], [9, 9]]``."""
    out: list[list[int]] = []
    for p in sorted(positions):
        if out and p == out[-1][1] + 1:
            out[-1][1] = p
        else:
            out.append([p, p])
    return out
