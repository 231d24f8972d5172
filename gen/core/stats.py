"""Stats, TraceStep, SampleOutput."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Stats:
    """What decoding one item cost.

    ``nfe``: model forward calls (both halves of guidance count as one). ``draft_nfe``: those of the
    draft model, if there is one. ``tokens``: tokens produced, up to and including the end where a
    row has one. ``tokens_computed``: positions of its own that were sent through the model, prompt
    included; what fills a batch up is not counted. ``mean_acceptance_length``: tokens per forward
    call, bonus included. ``draft_acceptance_rate``: accepted / drafted tokens, ``None`` where
    nothing is drafted. ``acceptance_histogram``: entry k = forward calls after which k drafts were
    accepted (empty where nothing is drafted). ``seconds``: wall time of the batch the item was in,
    divided by its rows. ``peak_memory``: bytes on the device, ``None`` on CPU.
    """

    nfe: int
    tokens: int
    tokens_computed: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_nfe: int | None = None
    seconds: float = 0.0
    peak_memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TraceStep:
    """One forward call as one row saw it. Step by step, emptying ``removed`` and then applying
    ``committed`` gives the row's tokens.

    ``window``: grid positions whose law was computed, ``accepted``: those whose draft was kept,
    ``committed``: position -> id (a latent is a list of floats). ``removed``: positions emptied
    again (re-masked after having been committed); one that got another id instead stands in
    ``committed`` of the same step too, and in its window. A row that ends commits the end at all
    places that are left in its last step, whether they were in the window or not.
    """

    window: list[int]
    accepted: list[int]
    committed: dict[int, Any]
    removed: list[int] = field(default_factory=list)

    def after(self, positions: int) -> TraceStep:
        """The same so many places further on."""

        def move(at):
            return [n + positions for n in at]

        committed = {n + positions: x for n, x in self.committed.items()}
        return TraceStep(move(self.window), move(self.accepted), committed, move(self.removed))


@dataclass
class SampleOutput:
    """What a sampler returns: ``tokens`` long [B, T] or latents [B, T, C], ``stats`` per row,
    ``traces`` per row if asked for."""

    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None = None

    def after(self, given: Tensor) -> SampleOutput:
        """The same with tokens [k] before all rows, and the places of traces behind them."""
        tokens = torch.cat([given.expand(len(self.tokens), *given.shape), self.tokens], 1)
        return replace(
            self,
            tokens=tokens,
            traces=self.traces and [[s.after(len(given)) for s in row] for row in self.traces],
        )
