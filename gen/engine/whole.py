"""Works that share no batch: one call of their pipeline, or a computation without a sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gen.core.errors import Interrupt
from gen.engine.ticket import ItemStep, Ticket
from gen.engine.work import Work
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline


@dataclass
class Computation:
    """Ticket whose result is computed without a sampler (``Ticket.compute``).

    Attributes:
        ticket: the ticket.
        pipe: pipeline of its model.
    """

    ticket: Ticket
    pipe: Pipeline

    def make(self) -> Any:
        """Return the result.

        Raises:
            GenError: the request was cancelled or missed its deadline, or it cannot be computed.
        """
        assert self.ticket.compute is not None, "other tickets become works"
        return self.ticket.compute(self.pipe, self.ticket.request, self.ticket.check)


def make_whole(work: Work, max_rows: int) -> PipelineOutput:
    """Make all items of a work.

    Args:
        work: the work.
        max_rows: items that are decoded at a time.

    Raises:
        GenError: the request was cancelled or missed its deadline, or its run failed.
    """
    ticket, request = work.ticket, work.ticket.request
    items = request.items
    steps = None if ticket.on_step is None else Steps(work)

    def callback(info: dict[str, Any]) -> None:
        if ticket.refusal() is not None:
            raise Interrupt
        if steps is not None:
            steps(info)

    def on_chunk(row: int, media: Any, preview: bool = False) -> None:
        ticket.send(items[row], media, preview)

    output = work.pipe.make(
        replace(
            request,
            callback=callback,
            on_chunk=on_chunk if ticket.on_chunk is not None else None,
            max_batch=max_rows,
        )
    )
    refusal = ticket.refusal()
    if refusal is not None and output.interrupted:
        raise refusal
    return output


class Steps:
    """Callback that tells a ticket of the forward passes of its items, from what changed.

    Args:
        work: the work.
    """

    def __init__(self, work: Work):
        self.ticket = work.ticket
        self.known: np.ndarray | None = None
        self.nfe = [0] * len(work.keys)

    def __call__(self, info: dict[str, Any]) -> None:
        """Tell the ticket of one step."""
        assert self.ticket.on_step is not None, "only steps that somebody receives are made"
        known = info["known"].cpu().numpy().copy()
        before = np.zeros_like(known) if self.known is None else self.known
        if before.shape != known.shape:  # the next batch of a request that is split
            before = np.zeros_like(known)
        self.known, tokens = known, info["tokens"]
        for row in range(len(known)):
            committed = (known[row] & ~before[row]).nonzero()[0].tolist()
            removed = (before[row] & ~known[row]).nonzero()[0].tolist()
            if not committed and not removed:
                continue
            self.nfe[row] += 1
            ids = tokens[row].cpu().numpy().copy() if tokens.ndim == 2 else None
            item = self.ticket.request.items[row]
            step = ItemStep(item, self.nfe[row], ids, known[row], committed, [], committed, removed)
            self.ticket.on_step(step)
