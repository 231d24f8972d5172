"""The causal loop: draft, one target forward, verify, commit. Every causal method is a drafter in
this loop.

Per row: n tokens are committed. The forward call gets the last committed token and the drafts of
positions n, n+1, ... and gives the law of n, n+1, ..., one place further than the drafts. Tokens
are ids, and their law log-probabilities [b, W, V]; or latents, and their law conditioning vectors
[b, W, H, D] (``gen.models.adapters.denoising_path``). The drafter says how many drafts are accepted
and which token follows them; those are committed. Rows advance independently, each with its own n,
window and round. One that is done makes room for the next item where the target has some waiting
(``CausalTarget.at_most``), or else leaves the batch. Nothing a row draws depends on another row.

A row that commits the space's end is over with it: the law leaves the places after it nothing but
the end, so they are filled without a forward call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.core.rng import RNG
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.host import to_device


@dataclass
class CausalStep:
    """What the parts of a method may look at in one round. b rows are left, W = columns computed.

    ``rows`` [b]: their numbers in the batch. ``round`` [b]: forward calls before this one.
    ``start`` [b]: tokens committed. ``positions`` [b, W] grid positions of the columns, ``valid``
    [b, W] whether they exist. ``widths`` and ``starts`` [b]: how many do, and ``start``, where the
    host knows them, so that nobody has to wait for the device.
    """

    rng: RNG
    rows: Tensor
    round: Tensor
    start: Tensor
    positions: Tensor
    valid: Tensor
    widths: np.ndarray | None = None
    starts: np.ndarray | None = None

    def categorical(
        self,
        logp: Tensor,
        purpose: str,
        active: Tensor,
        first: int | Tensor = 0,
        shared: bool = False,
    ) -> Tensor:
        """Ids [b, L] for the L columns from ``first`` on, or for the one column ``first`` [b] of
        each row. ``shared``: the noise belongs to the position, not the round."""
        if isinstance(first, Tensor):
            at = self.positions.gather(1, first[:, None])
        elif first or logp.shape[1] < self.positions.shape[1]:
            at = self.positions[:, first : first + logp.shape[1]]
        else:
            at = self.positions
        return self.rng.categorical(
            logp, self.rows, at, purpose, None if shared else self.round, active
        )

    def normal(self, purpose: str, size: int, columns: int, shared: bool = False) -> Tensor:
        """Standard normal float64 [b, columns, size] for the first columns. ``shared``: as in
        ``categorical``."""
        return self.rng.normal(
            self.rows, self.positions[:, :columns], purpose, None if shared else self.round, size
        )

    def flip(self, p: Tensor, purpose: str, active: Tensor) -> Tensor:
        return self.rng.flip(
            p, self.rows, self.positions[:, : p.shape[1]], purpose, self.round, active
        )


class Drafter:
    """Proposes, and learns what became of it. Its state has one row per row left in the batch. One
    with a draft model has ``nfe``, the draft's forward calls of every row of the whole batch."""

    window: int  # columns computed per forward call at most; drafts are at most window - 1

    def propose(self, step: CausalStep, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [b, L(, C)] for the first L <= W columns and bool [b, L], which of them exist.
        ``tokens`` [b, T(, C)] are the committed ones."""
        raise NotImplementedError

    def verify(self, step: CausalStep, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """From the law of W columns: accepted drafts per row [b], and tokens [b, W(, C)] whose
        column ``accepted`` is the one that follows (columns before it are the accepted drafts)."""
        raise NotImplementedError

    def observe(self, step: CausalStep, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """The outcome of the round as the host knows it: accepted drafts [b], and how many there
        were [b]."""

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [b])."""

    def renew(self, rows: Tensor) -> None:
        """The given rows (bool [b]) begin anew, with other items."""
        raise NotImplementedError


def decode_causal(
    target: CausalTarget,
    rng: RNG,
    drafter: Drafter,
    *,
    trace: bool = False,
    callback: Callable | None = None,
) -> SampleOutput:
    """Decodes every row of ``target``. What decides about the course of a row is on the host: after
    every forward call there is one copy from the device, of the accepted counts and the tokens."""
    total, device, end, branches = (
        target.length,
        target.device,
        target.space.eos_token_id,
        target.branches,
    )
    began = time.perf_counter()
    tokens = target.blank()
    written = (
        tokens.numpy() if tokens.ndim == 2 and device.type == "cpu" else None
    )  # the same memory
    batch, b = len(tokens), target.rows
    book = _Book(batch, drafter.window, trace, total, end)
    rows, start, round_ = np.arange(b), np.zeros(b, dtype=np.int64), np.zeros(b, dtype=np.int64)
    here = torch.from_numpy if device.type == "cpu" else lambda x: to_device(x, device)
    last = tokens[:b, :1]  # before position 0 the target puts its prompt
    finished = np.zeros(batch, dtype=np.int64)  # committed tokens of every row of the batch
    following, num_steps = b, 0
    size, of = (0, 0), here(rows)
    while len(rows):
        at = start.tolist()  # whose least and most take less time than an array's
        width = min(drafter.window, total - min(at))
        full = max(at) + width <= total
        if size != (len(rows), width):
            size = len(rows), width
            column, each, wide, every = (
                np.arange(width)[None],
                np.arange(len(rows)),
                np.full(len(rows), width),
                here(np.ones(size, dtype=bool)),
            )
        positions, widths, valid = start[:, None] + column, wide, every
        if not full:
            # a column that does not exist repeats the row's first one, token and place, which
            # changes nothing
            exists = positions < total
            positions, valid, widths = (
                np.where(exists, positions, start[:, None]),
                here(exists),
                np.minimum(total - start, width),
            )
        step = CausalStep(rng, of, here(round_), here(start), here(positions), valid, widths, start)
        drafts, drafted = drafter.propose(step, tokens if len(rows) == batch else tokens[of])
        given = torch.cat([last, drafts], 1)[:, :width] if drafts.shape[1] else last
        if not full:
            given = torch.where(valid if given.ndim == 2 else valid[..., None], given, last)
        output = target.predict(given, step.positions)
        computed, ran = output.num_computed_tokens, output.ran_network
        accepted, chosen = drafter.verify(step, output.logprobs)
        del output
        got, was, ids = _told(accepted, drafted, chosen)
        proposed = was.sum(1) if was.shape[1] else got
        own = (
            np.minimum(widths, proposed + 1) if was.shape[1] else widths
        )  # what is behind fills the window up that others need
        drafter.observe(step, got, proposed)
        count = np.minimum(got + 1, widths)
        if end is not None:
            new = column < count[:, None]
            ends = new & (ids == end)
            over = ends.any(1)
            count = np.where(over, ends.argmax(1) + 1, count)
            new = column < count[:, None]
            # drafts behind one that is the end itself were neither accepted nor rejected
            was = was & ((got < count)[:, None] | new[:, : was.shape[1]])
            got, proposed = np.minimum(got, count), was.sum(1)
        if target.is_history_dependent:
            target.refuse_illegal(chosen, step.positions, here(column < count[:, None]))
        if written is not None:
            for i, row, n, c in zip(
                range(len(rows)), rows.tolist(), start.tolist(), count.tolist(), strict=True
            ):
                written[row, n : n + c] = ids[i, :c]
            last = chosen if width == 1 else here(ids[each, count - 1, None])
        else:
            row, at = (column < count[:, None]).nonzero()
            tokens[here(rows[row]), here(positions[row, at])] = chosen[here(row), here(at)]
            last = chosen if width == 1 else chosen[here(each), here(count - 1)][:, None]
        book.add(
            rows,
            start,
            own,
            got,
            count,
            proposed,
            chosen if ids is None else ids,
            computed - (width - own) * branches,
            ran,
        )
        start, round_, num_steps = start + count, round_ + 1, num_steps + 1
        if end is not None and over.any():
            for i in over.nonzero()[0]:
                tokens[rows[i], start[i] :] = end
            start = np.where(over, total, start)
        if callback:
            finished[rows] = start
            known = here(np.arange(total) < finished[:, None])
            callback(
                {
                    "step": num_steps,
                    "done": int(finished.sum()),
                    "total": batch * total,
                    "tokens": tokens,
                    "known": known,
                }
            )
        if max(start.tolist()) >= total:
            done = start >= total
            free = done.nonzero()[0][: batch - following]
            if len(free):
                rows, start, round_, done = rows.copy(), start.copy(), round_.copy(), done.copy()
                rows[free], start[free], round_[free] = (
                    range(following, following + len(free)),
                    0,
                    0,
                )
                following += len(free)
                again = np.zeros_like(done)
                done[free], again[free] = False, True
                target.replace(here(again))
                drafter.renew(here(again))
            if done.any():
                left = ~done
                rows, start, round_, last = rows[left], start[left], round_[left], last[here(left)]
                if len(rows):
                    target.keep(here(left))
                    drafter.keep(here(left))
            of = here(rows)
    return book.output(tokens, time.perf_counter() - began, device, getattr(drafter, "nfe", None))


def _told(
    accepted: Tensor, drafted: Tensor, chosen: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What the host has to know of a round: accepted drafts [b], which drafts there were [b, L],
    and ids [b, W] if these are ids; in one copy, which is when the device is waited for."""
    ids, length = chosen if chosen.ndim == 2 else None, drafted.shape[1]
    if accepted.device.type == "cpu":
        return accepted.numpy(), drafted.numpy(), None if ids is None else ids.numpy()
    told = (
        torch.cat([accepted[:, None], drafted.long(), *([] if ids is None else [ids])], 1)
        .cpu()
        .numpy()
    )
    return (
        told[:, 0],
        told[:, 1 : 1 + length].astype(bool),
        None if ids is None else told[:, 1 + length :],
    )


class _Book:
    """Statistics and traces per row. Rounds are noted as they are and counted in the end: of a
    small model a round takes little longer than counting it."""

    def __init__(self, batch: int, window: int, trace: bool, total: int, end: int | None):
        self.batch, self.window, self.total, self.end = batch, window, total, end
        self.rounds: list[tuple] = []
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(batch)] if trace else None

    def add(self, rows, start, width, accepted, count, drafted, chosen, computed, ran) -> None:
        """One round of the given rows [b]; arrays that nobody changes afterwards."""
        self.rounds.append((rows, accepted, count, drafted, computed, ran))
        if self.traces is None:
            return
        ids = chosen.tolist()
        for i, (row, n, w, a, c) in enumerate(
            zip(
                rows.tolist(),
                start.tolist(),
                width.tolist(),
                accepted.tolist(),
                count.tolist(),
                strict=True,
            )
        ):
            committed = {n + k: ids[i][k] for k in range(c)}
            if self.end is not None and ids[i][c - 1] == self.end:
                committed |= dict.fromkeys(range(n + c, self.total), self.end)
            self.traces[row].append(
                TraceStep(list(range(n, n + w)), list(range(n, n + a)), committed)
            )

    def output(
        self, tokens: Tensor, seconds: float, device: torch.device, draft_nfe: list[int] | None
    ) -> SampleOutput:
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        rows, accepted, count, drafted = (
            np.concatenate([r[i] for r in self.rounds]) for i in range(4)
        )
        positions = np.concatenate([np.broadcast_to(r[4], len(r[0])) for r in self.rounds])
        ran = np.ones(len(rows), dtype=np.int64)
        if self.rounds[0][5] is not None:
            ran = torch.cat([r[5] for r in self.rounds]).long().cpu().numpy()

        def sums(x):
            return np.bincount(rows, x, self.batch).astype(np.int64).tolist()

        nfe, computed, done, kept, tried = map(sums, (ran, positions, count, accepted, drafted))
        histogram = np.zeros(
            (self.batch, max(self.window, int(accepted.max()) + 1)), dtype=np.int64
        )  # a window may grow from round to round
        np.add.at(histogram, (rows, accepted), 1)
        stats = [
            Stats(
                nfe=nfe[row],
                tokens=done[row],
                tokens_computed=computed[row],
                mean_acceptance_length=done[row] / nfe[row],
                draft_acceptance_rate=kept[row] / tried[row] if tried[row] else None,
                acceptance_histogram=(
                    _cut(histogram[row].tolist(), self.window) if tried[row] else []
                ),
                draft_nfe=draft_nfe[row] if draft_nfe else None,
                seconds=seconds / len(tokens),
                peak_memory=memory,
            )
            for row in range(self.batch)
        ]
        return SampleOutput(tokens, stats, self.traces)


def _cut(counts: list[int], length: int) -> list[int]:
    """Without the noughts at the end that are beyond ``length``: what other rows accepted shows in
    no row's counts."""
    return counts[: max(length, max((i + 1 for i, n in enumerate(counts) if n), default=0))]
