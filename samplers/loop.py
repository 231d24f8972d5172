"""The causal loop: draft, one target forward, verify, commit. Every causal method is a drafter in this loop.

Per row: n tokens are committed. The forward call gets the last committed token and the drafts of positions n, n+1, ...
and gives the law of n, n+1, ..., one place further than the drafts. Tokens are ids, and their law log-probabilities
[b, W, V]; or latents, and their law conditioning vectors [b, W, H, D] (``gen.models.paths``). The drafter says how many drafts are accepted and
which token follows them; those are committed. Rows advance independently, each with its own n, window and round, and
leave the batch when they are done. Nothing a row draws depends on another row.

A row that commits the space's end is over with it: the law leaves the places after it nothing but the end, so they are filled
without a forward call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gen.draws import Draws
from gen.models.targets import CausalTarget
from gen.types import SampleOutput, Stats, TraceStep


@dataclass
class Round:
    """What the parts of a method may look at in one round. b rows are left, W = columns computed.

    ``rows`` [b]: their numbers in the batch. ``round`` [b]: forward calls before this one. ``start`` [b]: tokens
    committed. ``positions`` [b, W] grid positions of the columns, ``valid`` [b, W] whether they exist.
    """

    draws: Draws
    rows: Tensor
    round: Tensor
    start: Tensor
    positions: Tensor
    valid: Tensor

    def categorical(self, logp: Tensor, purpose: str, active: Tensor, first: int | Tensor = 0,
                    shared: bool = False) -> Tensor:
        """Ids [b, L] for the L columns from ``first`` on, or for the one column ``first`` [b] of each row. ``shared``: the
        noise belongs to the position, not the round."""
        if isinstance(first, Tensor):
            at = self.positions.gather(1, first[:, None])
        else:
            at = self.positions[:, first : first + logp.shape[1]]
        return self.draws.categorical(logp, self.rows, at, purpose, None if shared else self.round, active)

    def normal(self, purpose: str, size: int, columns: int, shared: bool = False) -> Tensor:
        """Standard normal float64 [b, columns, size] for the first columns. ``shared``: as in ``categorical``."""
        return self.draws.normal(self.rows, self.positions[:, :columns], purpose, None if shared else self.round, size)

    def flip(self, p: Tensor, purpose: str, active: Tensor) -> Tensor:
        return self.draws.flip(p, self.rows, self.positions[:, : p.shape[1]], purpose, self.round, active)


class Drafter(Protocol):
    """Proposes, and learns what became of it. Its state has one row per row left in the batch. One with a draft model
    has ``nfe``, the draft's forward calls of every row of the whole batch."""

    window: int  # columns computed per forward call at most; drafts are at most window - 1

    def propose(self, now: Round, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [b, L(, C)] for the first L <= W columns and bool [b, L], which of them exist. ``tokens`` [b, T(, C)] are
        the committed ones."""

    def verify(self, now: Round, law: Tensor) -> tuple[Tensor, Tensor]:
        """From the law of W columns: accepted drafts per row [b], and tokens [b, W(, C)] whose column ``accepted`` is the one
        that follows (columns before it are the accepted drafts)."""

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [b])."""


def decode_causal(target: CausalTarget, draws: Draws, drafter: Drafter, *, trace: bool = False,
                  callback: Callable | None = None) -> SampleOutput:
    """Decodes every row of ``target``."""
    total, batch, device, end = target.length, target.rows, target.device, target.space.end_id
    began = time.perf_counter()
    tokens = target.blank()
    book = _Book(batch, drafter.window, trace, total, end)
    rows = torch.arange(batch, device=device)
    start = torch.zeros(batch, dtype=torch.long, device=device)
    round_ = torch.zeros(batch, dtype=torch.long, device=device)
    finished = torch.zeros(batch, dtype=torch.long, device=device)  # committed tokens of every row of the batch
    step = 0
    while len(rows):
        width = min(drafter.window, total - int(start.min()))
        column = torch.arange(width, device=device)
        positions = start[:, None] + column
        valid = positions < total
        # a column that does not exist repeats the row's first one, token and place, which changes nothing
        positions = torch.where(valid, positions, start[:, None])
        now = Round(draws, rows, round_, start, positions, valid)
        drafts, drafted = drafter.propose(now, tokens[rows])
        last = tokens[rows, (start - 1).clamp_min(0)]  # before position 0 the target puts its prompt
        given = torch.cat([last[:, None], drafts], 1)[:, :width]
        exists = valid if given.ndim == 2 else valid[..., None]
        law, computed = target.predict(torch.where(exists, given, last[:, None]), positions)
        accepted, chosen = drafter.verify(now, law)
        count = torch.minimum(accepted + 1, valid.sum(1))
        new = column < count[:, None]
        if end is not None:
            ends = new & (chosen == end)
            over = ends.any(1)
            count = torch.where(over, ends.long().argmax(1) + 1, count)
            new = column < count[:, None]
            # drafts behind one that is the end itself were neither accepted nor rejected
            drafted = drafted & ((accepted < count)[:, None] | new[:, : drafted.shape[1]])
            accepted = torch.minimum(accepted, count)
        target.refuse_illegal(chosen, positions, new)
        where = rows[:, None].expand_as(positions)[new], positions[new]
        tokens[where] = chosen[new]
        book.add(rows, start, valid.sum(1), accepted, count, drafted, chosen, computed, target.ran)
        start, round_, step = start + count, round_ + 1, step + 1
        if end is not None:
            behind = over[:, None] & (torch.arange(total, device=device) >= start[:, None])
            tokens[rows] = torch.where(behind, end, tokens[rows])
            start = torch.where(over, total, start)
        if callback:
            finished.index_copy_(0, rows, start)
            known = torch.arange(total, device=device) < finished[:, None]
            callback({"step": step, "done": int(finished.sum()), "total": batch * total, "tokens": tokens, "known": known})
        left = start < total
        if not bool(left.all()):
            rows, start, round_ = rows[left], start[left], round_[left]
            if len(rows):
                target.keep(left)
                drafter.keep(left)
    return book.output(tokens, time.perf_counter() - began, device, getattr(drafter, "nfe", None))


class _Book:
    """Statistics and traces per row."""

    def __init__(self, batch: int, window: int, trace: bool, total: int, end: int | None):
        self.total, self.end = total, end
        self.nfe, self.computed, self.tokens = [0] * batch, [0] * batch, [0] * batch
        self.accepted, self.drafted = [0] * batch, [0] * batch
        self.histogram = [[0] * window for _ in range(batch)]
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(batch)] if trace else None

    def add(self, rows, start, width, accepted, count, drafted, chosen, computed, ran) -> None:
        drafted = drafted.sum(1).tolist()
        ids = chosen.tolist() if self.traces is not None else None
        for i, (row, n, w, a, c) in enumerate(
            zip(rows.tolist(), start.tolist(), width.tolist(), accepted.tolist(), count.tolist(), strict=True)
        ):
            self.nfe[row] += 1 if ran is None else int(ran[i])
            self.computed[row] += computed
            self.tokens[row] += c
            self.accepted[row] += a
            self.drafted[row] += drafted[i]
            counts = self.histogram[row]
            counts += [0] * (a + 1 - len(counts))  # a window may grow from round to round
            counts[a] += 1
            if self.traces is not None:
                committed = {n + k: ids[i][k] for k in range(c)}
                if self.end is not None and ids[i][c - 1] == self.end:
                    committed |= dict.fromkeys(range(n + c, self.total), self.end)
                self.traces[row].append(TraceStep(list(range(n, n + w)), list(range(n, n + a)), committed))

    def output(self, tokens: Tensor, seconds: float, device: torch.device, draft_nfe: list[int] | None) -> SampleOutput:
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        stats = [
            Stats(
                nfe=n,
                tokens=self.tokens[row],
                tokens_computed=self.computed[row],
                mean_acceptance_length=self.tokens[row] / n,
                draft_acceptance_rate=self.accepted[row] / self.drafted[row] if self.drafted[row] else None,
                acceptance_histogram=self.histogram[row] if self.drafted[row] else [],
                draft_nfe=draft_nfe[row] if draft_nfe else None,
                seconds=seconds / len(tokens),
                peak_memory=memory,
            )
            for row, n in enumerate(self.nfe)
        ]
        return SampleOutput(tokens, stats, self.traces)
