"""Engine: requests of many callers, decoded in shared batches.

    engine = Engine(device="cpu")
    ticket = engine.submit("image", "a red circle", "sjd", num_samples=2, seed=3)
    ticket.result().images[0]

Works whose model, sampler and token space agree share a lane. A lane has a batch that its items
join and leave between forward passes (``gen.engine.open_batch``); one thread runs the
forward passes of all lanes in turn. Works that cannot share a batch (searches, next-scale models,
continuations, conditions with media ...) run whole in another thread, as does what is computed of
prompts without a sampler. Two threads load models and prepare requests, two prepare those with
structured output, whose constraints another process builds (``gen.constraints.process``), and one
decodes media.

An item has the tokens that it has in a call of its own, whatever else runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil

from gen.constraints.budget import Limits
from gen.constraints.builder import ConstraintBuilder
from gen.constraints.process import BuilderProcess
from gen.core.edit_spec import EditSpec
from gen.core.memory import free_memory, is_out_of_memory, trim
from gen.core.resolve import SamplerSpec
from gen.engine.lane import Lane, LaneBatch
from gen.engine.models import ServedModels
from gen.engine.stats import EngineStats
from gen.engine.ticket import (
    RUNNING,
    WAITING,
    Cancelled,
    Compute,
    Ending,
    OnChunk,
    OnStep,
    QueueFull,
    Ticket,
)
from gen.engine.whole import Computation, make_whole
from gen.engine.work import Work, work_of
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline, Prompts

MOST_WAITING = 256
MOST_ROWS = 8
MOST_PREPARED = 32  # requests that are prepared and in no batch yet
PREPARING = 2  # threads that load models and prepare requests; as many for structured output
LIMITS = Limits()
SETTLED = 1.0  # seconds after which nothing holds what an answer was made of
KEPT_IDLE = 30.0  # seconds that a lane without work keeps its batch
SHARE = 0.5  # share of the free memory that keys and values may take


class Engine:
    """Queues of requests and the threads that decode them.

    Attributes:
        models: models that are served, loaded when a request first needs them.
        stats: counts for monitoring.
        constraints: builder of constraints, with their cache.

    Args:
        models: ids and pipelines; None serves the models of the package.
        device: device of models that the engine loads.
        dtype: floating-point type of them.
        max_rows: rows of a lane.
        max_waiting: items that may wait, over all lanes.
        max_bytes: bytes that keys and values may take; None takes half of the memory that is free.
        limits: what building the constraint of a request may take.
    """

    def __init__(
        self,
        models: Mapping[str, Pipeline] | None = None,
        device: str = "auto",
        dtype: str = "float32",
        max_rows: int = MOST_ROWS,
        max_waiting: int = MOST_WAITING,
        max_bytes: float | None = None,
        limits: Limits = LIMITS,
    ):
        self.models = ServedModels(models, device, dtype)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        free = psutil.virtual_memory().available
        self.max_bytes = SHARE * free if max_bytes is None else max_bytes
        self.stats = EngineStats()
        self.constraints = ConstraintBuilder(limits, BuilderProcess())
        self._lanes: dict[Hashable, Lane] = {}
        self._tickets: set[Ticket] = set()
        self._lock = threading.Lock()
        self._to_prepare: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._has_holes = False  # a constraint, which may be large, has left free memory

        self._structured: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._whole: queue.SimpleQueue[Work | Computation | None] = queue.SimpleQueue()
        self._prepared = threading.Semaphore(MOST_PREPARED)
        self._media = ThreadPoolExecutor(1, "gen-media")
        self._is_closed = False
        self._busy, self._busy_since = 0.0, 0.0  # seconds with work; when the work began
        self._ends: deque[tuple[float, int]] = deque(maxlen=64)  # busy seconds, items of the ended
        preparing = [(self._prepare, q) for q in (self._to_prepare, self._structured)] * PREPARING
        self._threads = [
            threading.Thread(target=loop, args=args, name=f"gen{loop.__name__}", daemon=True)
            for loop, *args in [*preparing, (self._decode,), (self._decode_whole,)]
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        model: str,
        prompts: Prompts | None = None,
        sampler: SamplerSpec | None = None,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        start: EditSpec = EditSpec(),
        trace: bool = False,
        on_chunk: OnChunk | None = None,
        on_step: OnStep | None = None,
        partial_images: int = 0,
        deadline: float | None = None,
        compute: Compute | None = None,
        **options: Any,
    ) -> Ticket:
        """Take a request, whose arguments are checked at once; see also ``Pipeline.__call__``.

        Args:
            model: id of a served model.
            start: edit, continuation or length to start from.
            trace: record every step in the output.
            on_chunk: receiver of parts of media (``gen.pipeline.streaming``); None sends none.
            on_step: receiver of forward passes.
            partial_images: previews of each image that ``on_chunk`` gets.
            deadline: seconds after which it fails.
            compute: what is computed instead of running the sampler.
            options: sampling parameters, and other names of arguments.

        Raises:
            GenError: anything that cannot be done.
            QueueFull: too many items wait.
        """
        pipe, options = self.models.pipeline(model), self.models.get(model).options_of(options)
        request = pipe.request(prompts, sampler, num_samples, seed, options)
        request = replace(request, start=start, previews=partial_images, trace=trace)
        ticket = Ticket(model, request, on_chunk, on_step, deadline, compute)
        count = len(request.items)
        with self._lock:
            if self._is_closed:
                raise Cancelled("the engine is closed")
            self._require_room(count)
            if not self._tickets:
                self._busy_since = time.monotonic()
            self.stats.move(ticket, waiting=count)
            self._tickets.add(ticket)
        ticket.add_done_callback(self._forget)
        is_structured = request.sampling.structured is not None
        (self._structured if is_structured else self._to_prepare).put(ticket)
        return ticket

    def stop_building(self) -> None:
        """End the requests whose constraints are not built yet: the engine will close."""
        self.constraints.stop(Ending("the server ends; expected another try"))

    def close(self) -> None:
        """Cancel everything and end the threads."""
        with self._lock:
            self._is_closed = True
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.cancel()
        for _ in range(PREPARING):
            for waiting in (self._to_prepare, self._structured):
                waiting.put(None)
                self._prepared.release()
        self._inbox.put(None)
        self._whole.put(None)
        for thread in self._threads:
            thread.join()
        self.constraints.close()
        for ticket in tickets:
            ticket.finish(None, Cancelled("the engine was closed"))
        self._media.shutdown()

    def _forget(self, ticket: Ticket) -> None:
        self.stats.ended(ticket)
        with self._lock:
            self._ends.append((self._busy_seconds(), len(ticket.request.items)))
            self._tickets.discard(ticket)
            if not self._tickets:
                self._busy = self._ends[-1][0]

    def _require_room(self, count: int) -> None:
        """Raise ``QueueFull`` where so many items more cannot wait."""
        waiting = self.stats.waiting.total()
        many = waiting + count - self.max_waiting
        if many > 0:
            raise QueueFull(
                f"{waiting} items wait, and the request has {count}; expected at most"
                f" {self.max_waiting} waiting",
                retry_after=self._seconds_per_item() * many,
            )

    def _busy_seconds(self) -> float:
        """Return the time so far in which there was a request."""
        return self._busy + (time.monotonic() - self._busy_since if self._tickets else 0.0)

    def _seconds_per_item(self) -> float:
        """Estimate the time of work between two items, from the requests that ended lately."""
        if len(self._ends) < 2:
            return 1.0
        first, last = self._ends[0][0], self._ends[-1][0]
        return (last - first) / max(1, sum(count for _, count in self._ends) - self._ends[0][1])

    # threads that prepare

    def _prepare(self, tickets: queue.SimpleQueue[Ticket | None]) -> None:
        # a thread that waits holds no request: their constraints may be large
        while (ticket := tickets.get()) is not None:
            self._prepare_one(ticket)
            del ticket

    def _prepare_one(self, ticket: Ticket) -> None:
        self._prepared.acquire()
        refusal = ticket.refusal()
        if refusal is None:
            try:
                pipe = self.models.pipeline(ticket.model)
                if ticket.compute is not None:
                    self._whole.put(Computation(ticket, pipe))
                    return
                work = work_of(ticket, pipe, self._media, self.constraints)
                (self._whole if work.lane is None else self._inbox).put(work)
                return
            except Exception as error:  # a wrong request, or a model that cannot be read
                refusal = error
        self._prepared.release()
        ticket.finish(None, refusal)

    # the thread of works that share no batch

    def _decode_whole(self) -> None:
        while (work := self._whole.get()) is not None:
            self._make_whole(work)
            del work

    def _make_whole(self, work: Work | Computation) -> None:
        self._prepared.release()
        ticket, count = work.ticket, len(work.ticket.request.items)
        self.stats.move(ticket, waiting=-count, running=count)
        ticket.state = RUNNING
        try:
            refusal = ticket.refusal()
            if refusal is not None:
                raise refusal
            output = work.make() if isinstance(work, Computation) else self._made(work)
        except Exception as error:
            ticket.finish(None, error)
            return
        ticket.finish(output)

    def _made(self, work: Work) -> PipelineOutput:
        """Make all items of a work, and count what they took."""
        output = make_whole(work, self.max_rows)
        nfe = sum(stats.nfe for stats in output.stats)
        tokens = sum(stats.tokens for stats in output.stats)
        self.stats.add(work.ticket.model, nfe=nfe, tokens=tokens)
        return output

    # the thread of batches

    def _decode(self) -> None:
        while self._take_inbox():
            self._step_lanes()

    def _step_lanes(self) -> None:
        for lane in list(self._lanes.values()):
            self._sweep(lane)
            self._admit(lane)
            for batch in list(lane.batches):
                if batch.members:
                    self._step(lane, batch)
            lane.drop_spent()
        self._drop_idle()

    def _take_inbox(self) -> bool:
        """Put new works into their lanes; wait for one where there is nothing to do. Returns False
        when the engine is closed."""
        is_idle = all(lane.is_idle for lane in self._lanes.values())
        wait: float | None = 0.0
        if is_idle:
            wait = SETTLED if self._has_holes else KEPT_IDLE if self._lanes else None
        while True:
            try:
                work = self._inbox.get(block=wait != 0, timeout=wait or None)
            except queue.Empty:
                if wait and self._has_holes:
                    self._has_holes = False
                    trim()
                return True
            if work is None:
                return False
            if work.holds_slot:
                work.holds_slot = False
                self._prepared.release()
            lane = self._lanes.get(work.lane)
            if lane is None:
                served = self.models.get(work.ticket.model)
                is_kept = work.ticket.request.sampling.structured is None
                lane = Lane(served.parent or served.id, self.max_rows, self.stats, is_kept)
                self._lanes[work.lane] = lane
            lane.queue.append(work)
            wait = 0.0

    def _sweep(self, lane: Lane) -> None:
        """Free the rows of requests that nobody waits for any more."""
        for work in lane.works():
            refusal = work.refusal
            if refusal is not None:
                lane.remove(work)
                work.ticket.finish(None, refusal)

    def _admit(self, lane: Lane) -> None:
        """Let works of the queue into the batch; what fails ends the works that wait."""
        used = sum(other.nbytes for other in self._lanes.values())
        queued = list(lane.queue)
        try:
            lane.admit(self.max_bytes - used)
        except Exception as error:
            self._recover(lane, queued, error)
        if not lane.is_idle:
            lane.idle_since = time.monotonic()

    def _step(self, lane: Lane, batch: LaneBatch) -> None:
        try:
            batch.step(self._finish)
        except Exception as error:
            works = {id(m.work): m.work for m in batch.members.values()}
            lane.batches.remove(batch)
            self._recover(lane, list(works.values()), error)

    def _recover(self, lane: Lane, works: list[Work], error: Exception) -> None:
        """Decode the works of a batch that failed again, apart from each other, so that only the
        one that is the cause fails. Where memory ran out, the lane gets fewer rows."""
        if is_out_of_memory(error) and lane.max_rows > 1:
            error.with_traceback(None)
            free_memory()
            lane.max_rows //= 2
        elif len(works) == 1:
            lane.remove(works[0])
            works[0].ticket.finish(None, error)
            return
        else:
            for work in works:
                work.lane = ("alone", work.lane, id(work.ticket))
        for work in works:
            lane.remove(work)
            ticket = work.ticket
            self.stats.settle(ticket)
            self.stats.move(ticket, waiting=len(work.keys))
            work.outputs, ticket.state = {}, WAITING
            self._inbox.put(work)

    def _finish(self, work: Work) -> None:
        """Decode the media of a work, and end its ticket, in the thread of media."""

        def finish() -> None:
            stream = None if work.media is None else work.media.stream
            try:
                if work.media is not None and work.media.error is not None:
                    raise work.media.error
                made = work.pipe.complete(work.prepared, work.output(), work.length_pass, stream)
                work.ticket.finish(made)
            except Exception as error:
                work.ticket.finish(None, error)

        self._media.submit(finish)

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for key, lane in list(self._lanes.items()):
            kept = KEPT_IDLE if lane.is_kept else 0.0
            if lane.is_idle and now - lane.idle_since >= kept:
                del self._lanes[key]
                self._has_holes = self._has_holes or not lane.is_kept
