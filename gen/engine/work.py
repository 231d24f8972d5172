"""Work of an engine: a ticket whose model is loaded, and the sender of its media."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gen.constraints.builder import ConstraintBuilder
from gen.core.resolve import spell
from gen.core.rng import CounterRNG
from gen.core.stats import SampleOutput, TraceStep
from gen.core.token_space import TokenSpace
from gen.engine.open_batch import may_open
from gen.engine.ticket import ItemStep, Ticket
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.request import PreparedRun
from gen.pipeline.streaming import Stream


@dataclass
class Work:
    """Ticket that is ready to decode.

    Attributes:
        ticket: the ticket.
        pipe: pipeline of its model.
        prepared: its run.
        keys: keys of the items' random numbers.
        canvas: canvas to start from; None where there is none.
        length_pass: what drawing the lengths of rows computed (``Pipeline.start_canvas``).
        lane: what works have in common that may share a batch; None where this one shares none.
        mixed: whether the items of its batch may differ in filters of the distribution.
        media: sender of the media; None where nobody receives them.
        outputs: outputs of the items that are finished.
        holds_slot: whether it counts among the prepared requests that are in no batch yet.
        error: error of a receiver of steps.
    """

    ticket: Ticket
    pipe: Pipeline
    prepared: PreparedRun
    keys: list[int]
    canvas: Tensor | None
    length_pass: list[tuple[int, int]]
    lane: Hashable | None
    mixed: bool
    media: MediaSender | None
    outputs: dict[int, SampleOutput] = field(default_factory=dict)
    holds_slot: bool = True
    error: Exception | None = None

    @property
    def refusal(self) -> Exception | None:
        """Error with which the work ends before it is done; None while it goes on."""
        sent = None if self.media is None else self.media.error
        return self.ticket.refusal() or self.error or sent

    @property
    def is_decoded(self) -> bool:
        """True once all items have their tokens."""
        return len(self.outputs) == len(self.keys)

    def output(self) -> SampleOutput:
        """Return the outputs of all items as one."""
        parts = [self.outputs[row] for row in range(len(self.keys))]
        traces = [trace for part in parts for trace in part.traces or ()]
        logprobs = [row for part in parts for row in part.logprobs or ()]
        return SampleOutput(
            torch.cat([part.tokens for part in parts]),
            [stats for part in parts for stats in part.stats],
            traces if self.ticket.request.trace else None,
            logprobs if parts[0].logprobs is not None else None,
        )

    def send_step(
        self, row: int, tokens: Tensor, known: Tensor, steps: Sequence[TraceStep]
    ) -> None:
        """Tell the ticket of a forward pass of one of its items.

        Args:
            row: number of the item.
            tokens: its tokens [T], or latents [T, C].
            known: positions that are known, bool [T].
            steps: its steps so far.
        """
        assert self.ticket.on_step is not None, "only recorded steps are sent"
        last = steps[-1]
        step = ItemStep(
            self.ticket.request.items[row],
            len(steps),
            tokens.cpu().numpy().copy() if tokens.ndim == 1 else None,
            known.cpu().numpy().copy(),
            last.window,
            last.accepted,
            list(last.committed),
            last.removed,
        )
        try:
            self.ticket.on_step(step)
        except Exception as error:  # of the receiver, which is no matter of other requests
            self.error = error


class MediaSender:
    """Sender of the media of a work, in a thread that decodes them.

    A step of a row that is not decoded yet is replaced by the next one: what a stream sends depends
    on the tokens so far alone.

    Args:
        stream: decoder of the rows.
        thread: executor of one thread.
    """

    def __init__(self, stream: Stream, thread: Executor):
        self.stream, self.thread = stream, thread
        self.error: Exception | None = None
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._lock = threading.Lock()

    def step(self, row: int, tokens: Tensor, known: Tensor) -> None:
        """Send what a step has added to a row, tokens [T(, C)] of which some are known [T]."""
        with self._lock:
            is_new = row not in self._pending
            self._pending[row] = tokens.clone(), known.clone()
        if is_new:
            self.thread.submit(self._send, row)

    def _send(self, row: int) -> None:
        with self._lock:
            tokens, known = self._pending.pop(row)
        if self.error is None:
            try:
                self.stream.step(row, tokens, known)
            except Exception as error:  # of a receiver, or a decoder: the ticket gets it
                self.error = error


def work_of(
    ticket: Ticket, pipe: Pipeline, thread: Executor, constraints: ConstraintBuilder
) -> Work:
    """Load the model of a ticket and prepare its run.

    Args:
        ticket: the ticket.
        pipe: pipeline of its model.
        thread: executor of one thread, for media.
        constraints: builder of the constraint of structured output; the ticket's end ends it.

    Raises:
        GenError: anything that cannot be done.
    """
    ticket.request = replace(
        ticket.request, build=partial(constraints.build, interrupted=ticket.refusal)
    )
    request = ticket.request
    prepared = pipe.prepare(request)
    keys = [pipe.draw_key(item) for item in prepared.request.items]  # an edit states its prompt
    opens = prepared.prefix is None and may_open(request.sampler, prepared.target, prepared.drafts)
    if not opens:
        return Work(ticket, pipe, prepared, keys, None, [], None, False, None)
    canvas, length_pass = pipe.start_canvas(prepared, CounterRNG(keys, pipe.device))
    media = None
    if ticket.on_chunk is not None:

        def on_chunk(row: int, media: Any, preview: bool = False) -> None:
            ticket.send(request.items[row], media, preview)

        media = MediaSender(pipe.stream_for(prepared, on_chunk), thread)
    sampling = request.sampling
    mixed = (
        request.sampler.mixes_sampling
        and not prepared.space.channels
        and prepared.space.constraint is None
        and sampling.logprobs is None
        and not sampling.looks_back
    )
    distribution = sampling.controls() if mixed else sampling.keywords()
    lane = (
        id(pipe),  # a model and those of its adapters are one pipeline
        prepared.model,
        repr(sorted(spell(request.spec).items(), key=str)),
        repr(sorted(distribution.items())),
        sampling.guided,
        ticket.traced,  # runs record all steps or none
        prepared.target.limits is None,
        prepared.target.known is None,
        _of_space(prepared.space),
    )
    return Work(ticket, pipe, prepared, keys, canvas, length_pass, lane, mixed, media)


def _of_space(space: TokenSpace) -> tuple[Hashable, ...]:
    """Return what equal token spaces have in common, but for rules that parameters name."""
    return (
        space.grid,
        space.vocab_size,
        space.channels,
        space.eos_token_id,
        space.ends,
        space.mask_token_id,
        hash(space.legal.cpu().numpy().tobytes()),
    )
