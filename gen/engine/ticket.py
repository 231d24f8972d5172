"""Ticket of a request: its state, its result, and the way to cancel it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gen.core.errors import GenError
from gen.pipeline.output import ItemPlan
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.request import GenerationRequest
from gen.pipeline.scoring import Check
from gen.pipeline.streaming import Chunk

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"


class QueueFull(GenError):
    """Refusal of a request that would have to wait behind too many others.

    Attributes:
        retry_after: seconds after which another try makes sense.
    """

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class Ending(GenError):
    """Request whose constraint is not built yet when the engine is about to close."""


class Cancelled(GenError):
    """Error of a request that its caller cancelled."""


class DeadlineExceeded(GenError):
    """Error of a request that was not done within the time that its caller gave it."""


@dataclass(frozen=True)
class ItemStep:
    """Forward pass of one item, as a caller sees it.

    Attributes:
        item: plan of the item.
        nfe: forward passes of the item so far.
        tokens: token ids of all positions, int64 [T]; None of latents. Unknown positions hold
            anything.
        known: positions whose token does not change any more, bool [T].
        window: positions whose distribution the pass computed.
        accepted: positions whose draft was accepted.
        committed: positions that got a token.
        removed: positions that were masked again.
    """

    item: ItemPlan
    nfe: int
    tokens: np.ndarray | None
    known: np.ndarray
    window: list[int]
    accepted: list[int]
    committed: list[int]
    removed: list[int]


class OnChunk(Protocol):
    """Receiver of parts of media, called in a thread of the engine; it must not wait."""

    def __call__(self, chunk: Chunk) -> None:
        """Take a part."""


class OnStep(Protocol):
    """Receiver of forward passes, called in a thread of the engine; it must not wait."""

    def __call__(self, step: ItemStep) -> None:
        """Take a step."""


class Compute(Protocol):
    """What is computed of prompts without a sampler."""

    def __call__(self, pipe: Pipeline, request: GenerationRequest, check: Check) -> Any:
        """Return the result.

        Args:
            pipe: pipeline of the model.
            request: the request, whose sampler is not run.
            check: called before every forward pass; raises where nobody waits any more.
        """


class Ticket:
    """Request that an engine has taken.

    Attributes:
        model: id of the model.
        request: the resolved request; its ``items`` have the seeds.
        state: waiting, running, done, failed or cancelled.
        submitted: time of submission, seconds of ``time.monotonic``.
        first_chunk: time of the first chunk; None before it.
        ended: time of the end; None before it.
        waiting: items that wait for a row.
        running: items that have a row.

    Args:
        model: id of the model.
        request: the request.
        on_chunk: receiver of parts of media.
        on_step: receiver of forward passes.
        deadline: seconds after which the request fails; None waits for ever.
        compute: what is computed instead of running the sampler; None runs it.
    """

    def __init__(
        self,
        model: str,
        request: GenerationRequest,
        on_chunk: OnChunk | None = None,
        on_step: OnStep | None = None,
        deadline: float | None = None,
        compute: Compute | None = None,
    ):
        self.model, self.request, self.compute = model, request, compute
        self.on_chunk, self.on_step = on_chunk, on_step
        self.submitted = time.monotonic()
        self.expires = None if deadline is None else self.submitted + deadline
        self.first_chunk: float | None = None
        self.ended: float | None = None
        self.state = WAITING
        self.waiting = self.running = 0
        self.cancelled = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Ticket], None]] = []
        self._output: Any = None
        self._error: BaseException | None = None

    @property
    def traced(self) -> bool:
        """True where forward passes are recorded."""
        return self.on_step is not None or self.request.trace

    @property
    def is_over(self) -> bool:
        """True once there is a result or an error."""
        return self._over.is_set()

    def cancel(self) -> None:
        """Give the request up: its rows are freed before the next forward pass."""
        self.cancelled.set()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the output, a ``PipelineOutput`` or what ``compute`` returned.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: there is no output yet.
            GenError: the request failed, was cancelled or missed its deadline.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"no output after {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self._output is not None, "a request without an error has an output"
        return self._output

    def add_done_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback(ticket)`` at the end, in a thread of the engine; or now, after it."""
        with self._lock:
            if not self.is_over:
                self._callbacks.append(callback)
                return
        callback(self)

    def check(self) -> None:
        """Raise the error of a request that nobody waits for any more."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    def refusal(self) -> GenError | None:
        """Return the error of a request that nobody waits for any more; None for all others."""
        if self.cancelled.is_set():
            return Cancelled("the request was cancelled")
        if self.expires is not None and time.monotonic() > self.expires:
            seconds = self.expires - self.submitted
            return DeadlineExceeded(f"the request was not done within {seconds:g} seconds")
        return None

    def send(self, item: ItemPlan, media: Any, preview: bool) -> None:
        """Hand a part of an item's media to the receiver."""
        if self.first_chunk is None:
            self.first_chunk = time.monotonic()
        if self.on_chunk is not None:
            self.on_chunk(Chunk(item, media, preview))

    def finish(self, output: Any, error: BaseException | None = None) -> None:
        """End the request with its output, or with an error; only the first end counts."""
        with self._lock:
            if self.is_over:
                return
            self._output, self._error = output, error
            self.ended = time.monotonic()
            self.state = DONE if error is None else FAILED
            if isinstance(error, Cancelled):
                self.state = CANCELLED
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
