"""Engine: one queue per model and sampler, and the threads that work on them.

engine = Engine(device="cpu")
ticket = engine.submit("image", "a red circle", "sjd", num_samples=2, seed=3)
ticket.result().images[0]
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gen.core.edit_spec import EditSpec
from gen.core.errors import Interrupt
from gen.core.sampler import SamplerSpec
from gen.engine.models import ServedModels
from gen.engine.ticket import RUNNING, OnChunk, OnStep, QueueFull, Ticket
from gen.pipeline.pipeline import Pipeline, Prompts

MOST_WAITING = 256
MOST_ROWS = 8


@dataclass
class EngineStats:
    """Counts of an engine since it began.

    Attributes:
        waiting: items that wait for a row, by model.
        running: items that have a row, by model.
        requests: requests by (model, state) that ended.
        nfe: forward passes of items, by model.
        steps: forward passes of batches, by model.
        tokens: committed tokens, by model.
        drafted: verified drafts, by model.
        accepted: accepted drafts, by model.
    """

    waiting: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    nfe: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


class Engine:
    """Queues of requests and the threads that decode them.

    Attributes:
        models: models that are served, loaded when a request first needs them.
        stats: counts for monitoring.

    Args:
        models: ids and pipelines; None serves the models of the package.
        device: device of models that the engine loads.
        dtype: floating-point type of them.
        max_rows: rows of a batch, per queue.
        max_waiting: items that may wait, over all queues.
    """

    def __init__(
        self,
        models: Mapping[str, Pipeline] | None = None,
        device: str = "auto",
        dtype: str = "float32",
        max_rows: int = MOST_ROWS,
        max_waiting: int = MOST_WAITING,
    ):
        self.models = ServedModels(models, device, dtype)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.stats = EngineStats()
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gen-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        model: str,
        prompts: Prompts | None = None,
        sampler: SamplerSpec | None = None,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        start: EditSpec = EditSpec(),
        on_chunk: OnChunk | None = None,
        on_step: OnStep | None = None,
        partial_images: int = 0,
        deadline: float | None = None,
        **options: Any,
    ) -> Ticket:
        """Take a request; see ``Pipeline.__call__`` for what is not listed here.

        Arguments are checked before the call returns.

        Args:
            model: id of a served model.
            prompts: one prompt or several.
            sampler: the sampler.
            num_samples: outputs per prompt.
            seed: seed of the first output of every prompt.
            start: edit, continuation or length to start from.
            on_chunk: receiver of parts of media (``gen.pipeline.streaming``); None sends none.
            on_step: receiver of forward passes.
            partial_images: previews of each image that ``on_chunk`` gets.
            deadline: seconds after which the request fails.
            options: sampling parameters, and other names of arguments.

        Raises:
            GenError: anything that cannot be done.
            QueueFull: too many items wait.
        """
        pipe = self.models.pipeline(model)
        request = pipe.request(prompts, sampler, num_samples, seed, dict(options))
        request = replace(request, start=start, previews=partial_images)
        waiting = self.stats.waiting.total()
        if waiting + len(request.items) > self.max_waiting:
            raise QueueFull(
                f"{waiting} items wait, and the request has {len(request.items)}; expected at most"
                f" {self.max_waiting} waiting",
                retry_after=1.0,
            )
        ticket = Ticket(model, request, on_chunk, on_step, deadline)
        self.stats.waiting[model] += len(request.items)
        self._tickets.put(ticket)
        return ticket

    def close(self) -> None:
        """Cancel everything and end the threads."""
        self._tickets.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            count = len(ticket.request.items)
            self.stats.waiting[ticket.model] -= count
            self.stats.running[ticket.model] += count
            try:
                ticket.finish(self._made(ticket))
            except Exception as error:
                ticket.finish(None, error)
            self.stats.running[ticket.model] -= count
            self.stats.requests[ticket.model, ticket.state] += 1

    def _made(self, ticket: Ticket):
        ticket.state = RUNNING
        items = ticket.request.items

        def callback(info: dict[str, Any]) -> None:
            if ticket.refusal() is not None:
                raise Interrupt

        def on_chunk(row: int, media: Any, preview: bool = False) -> None:
            ticket.send(items[row], media, preview)

        sends = on_chunk if ticket.on_chunk is not None else None
        request = replace(ticket.request, callback=callback, on_chunk=sends)
        output = self.models.pipeline(ticket.model).make(request)
        refusal = ticket.refusal()
        if refusal is not None and output.interrupted:
            raise refusal
        return output
