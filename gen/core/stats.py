"""Output of a sampler: tokens, statistics and traces."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gen.core.logprobs import ItemLogprobs


@dataclass
class Stats:
    """Cost of decoding one item.

    Attributes:
        nfe: forward passes of the model; both branches of guidance count as one.
        tokens: tokens produced, up to and including the eos token where a row has one.
        tokens_computed: the row's own positions that went through the model, prompt included.
        positions_computed: all positions that the model was asked for in this row, with the padding
            of shorter prompts and of windows that are shorter than another row's.
        mean_acceptance_length: tokens per forward pass, bonus tokens included.
        draft_acceptance_rate: accepted / drafted tokens; None without drafts.
        acceptance_histogram: entry k is the number of forward passes after which k drafts were
            accepted; empty where nothing is drafted.
        draft_nfe: forward passes of the draft model, if there is one.
        seconds: wall time of the batch the item was in, divided by its rows.
        peak_memory: bytes on the device; None on a CPU.
        partial_nfe: forward passes of ``nfe`` that computed a part of a masked canvas; None without
            a cache policy.
    """

    nfe: int
    tokens: int
    tokens_computed: int
    positions_computed: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_nfe: int | None = None
    seconds: float = 0.0
    peak_memory: int | None = None
    partial_nfe: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data."""
        return asdict(self)


@dataclass
class TraceStep:
    """Forward pass as recorded for one row.

    Step by step, masking ``removed`` and then applying ``committed`` gives the row's tokens. A row
    that ends commits the eos token at all positions that are left in its last step, whether they
    were in the window or not.

    Attributes:
        window: grid positions whose distribution was computed.
        accepted: positions whose draft was accepted.
        committed: position -> token id, or list of floats of a latent.
        removed: positions remasked after having been committed. One that got another token instead
            stands in ``committed`` of the same step too, and in its window.
    """

    window: list[int]
    accepted: list[int]
    committed: dict[int, Any]
    removed: list[int] = field(default_factory=list)

    def shifted(self, offset: int) -> TraceStep:
        """Return the same step with ``offset`` added to all positions."""

        def shift(positions: list[int]) -> list[int]:
            return [n + offset for n in positions]

        committed = {n + offset: token for n, token in self.committed.items()}
        return TraceStep(shift(self.window), shift(self.accepted), committed, shift(self.removed))


@dataclass(frozen=True)
class Candidate:
    """Output, or part of one, that a search looked at.

    Attributes:
        tokens: tokens [T], or latents [T, C].
        score: score that the search gave it; None where it gave none.
        level: number of the decision that it was a candidate of, from 0 on.
        parent: number of the candidate of the level before that it goes on from; None at level 0.
        chosen: whether it, or what came of it, is the output.
        known: decided positions, bool [T]; None where all are.
        weight: share of the item's answers, or particle's weight, that it stands for; None where
            there is no such number.
        label: words that a page shows beside it.
    """

    tokens: Tensor
    score: float | None
    level: int = 0
    parent: int | None = None
    chosen: bool = False
    known: Tensor | None = None
    weight: float | None = None
    label: str = ""

    def with_prefix(self, prefix: Tensor) -> Candidate:
        """Return the candidate with decided tokens [k] before its own."""
        known = self.known
        if known is not None:
            known = torch.cat([known.new_ones(len(prefix)), known])
        return replace(self, tokens=torch.cat([prefix.to(self.tokens), self.tokens]), known=known)


@dataclass
class SampleOutput:
    """Result of a sampler.

    Attributes:
        tokens: long [B, T], or latents [B, T, C].
        stats: cost of each row.
        traces: steps of each row, if asked for.
        logprobs: log-probabilities of each row's tokens up to and including the eos token, if
            asked for.
        candidates: what a search looked at for each row, level by level; None without a search.
    """

    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None = None
    logprobs: list[ItemLogprobs] | None = None
    candidates: list[list[Candidate]] | None = None

    def with_prefix(self, prefix: Tensor) -> SampleOutput:
        """Return the output with tokens [k] before all rows and candidates, which have no
        log-probabilities, and traces behind them."""
        tokens = torch.cat([prefix.expand(len(self.tokens), *prefix.shape), self.tokens], 1)
        traces = self.traces and [[s.shifted(len(prefix)) for s in row] for row in self.traces]
        given: ItemLogprobs = [None] * len(prefix)
        logprobs = self.logprobs and [given + row for row in self.logprobs]
        candidates = self.candidates and [
            [c.with_prefix(prefix) for c in row] for row in self.candidates
        ]
        return replace(self, tokens=tokens, traces=traces, logprobs=logprobs, candidates=candidates)
