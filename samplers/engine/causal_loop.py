"""Causal loop: draft, one forward pass of the target, verify, commit. Every causal method is a
drafter in this loop.

Per row, n tokens are committed. The forward pass gets the last committed token and the drafts of
positions n, n+1, ... and gives the distributions of positions n, n+1, ..., one further than the
drafts: the last of them is the bonus token's. Tokens are ids, and their distributions
log-probabilities [b, W, V]; or latents, and their distributions conditioning vectors [b, W, H, D]
(``gen.models.adapters.denoising_path``). The drafter says how many drafts are accepted and which
token follows them. Both are committed.

Rows advance independently, each with its own n, window and round. A row that is finished takes the
next waiting item, or leaves the batch (``gen.samplers.engine.rows``). Nothing a row draws depends
on another row. A row that commits the eos token, or a token that stops it, is finished: every later
position holds the eos token, and is filled without a forward pass.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import unknown
from gen.core.sampler import Callback, Sampler
from gen.samplers.engine.captured_step import StepGraphs
from gen.samplers.engine.ends import RowEnds
from gen.samplers.engine.failed import refuse_failed
from gen.samplers.engine.host import to_device
from gen.samplers.engine.logprobs import LogprobRecorder
from gen.samplers.engine.outputs import ITEM
from gen.samplers.engine.rows import BatchSlots, RowOwner, SlotChange
from gen.samplers.engine.stats import StatsRecorder
from gen.samplers.engine.step import Computed, compute
from gen.samplers.engine.step_context import CausalStep
from gen.samplers.engine.stepping import Estimate, SteppableRun, by_ancestor

if TYPE_CHECKING:
    from gen.core.rng import RNG
    from gen.core.stats import SampleOutput
    from gen.models.targets.base import StepOutput, Target
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Draft, Verdict

# log-probabilities before temperature and filters, and hidden states of ``hidden_layers``
RAW_LOGPROBS, HIDDEN_STATES = NEEDS = ("raw_logprobs", "hidden_states")


class Drafter(RowOwner):
    """Method in the causal loop: it proposes drafts, verifies them and observes the outcome.

    Attributes:
        window: columns computed per forward pass at most; drafts are at most ``window - 1``.
        targets: draft models of the same items, whose rows follow the batch.
        needs: capabilities asked of the target, of ``NEEDS``.
        hidden_layers: layers whose hidden states it needs (``StepOutput.hidden_states``).
        nfe: forward passes of the draft model, of every item; None without a draft model.
        captures: whether ``propose`` and ``verify`` read no value on the host, of the step neither,
            and make tensors whose shapes depend on the numbers of rows and columns alone.
    """

    window: int
    targets: tuple[Target, ...] = ()
    needs: frozenset[str] = frozenset()
    hidden_layers: tuple[str, ...] = ()
    captures: bool = False
    nfe: list[int] | None = None

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        """Draft tokens of the step's first columns, behind the committed ``tokens`` [b, T(, C)]."""
        raise NotImplementedError

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        """Accept drafts, as ``propose`` returned them, and say which token follows them, by the
        distributions of the step's W columns."""
        raise NotImplementedError

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        """Learn the outcome of the step from what the host knows: accepted drafts, and drafts that
        there were, int64 [b]."""


def check_needs(drafter: Drafter, target: CausalTarget) -> None:
    """Ask the target for what a method needs beyond log-probabilities. Raises ``GenError``: the
    target's model cannot give it, or nobody can."""
    name = type(drafter).__name__
    for need in sorted(drafter.needs):
        if need == RAW_LOGPROBS:
            target.gives_raw = True
        elif need == HIDDEN_STATES:
            target.require_hidden_states(drafter.hidden_layers, name)
        else:
            raise unknown("need", need, NEEDS, name)


@dataclass
class Outcome:
    """Outcome of a step as the host knows it.

    Attributes:
        num_accepted: accepted drafts, int64 [b].
        drafted: drafts that there were, bool [b, L].
        token_ids: tokens of the verdict, int64 [b, W]; None for latents.
        num_drafted: drafts of each row, int64 [b].
        num_committed: tokens to commit, int64 [b].
        num_columns: columns that are a row's own, int64 [b]; those behind fill the window up to
            that of other rows.
        failed: columns without a distribution, bool [b, W].
        draft_failed: drafts without one, bool [b, L]; None without a draft model.
        ended: rows that commit the eos token or are stopped, bool [b]; None without eos tokens.
    """

    num_accepted: np.ndarray
    drafted: np.ndarray
    token_ids: np.ndarray | None
    num_drafted: np.ndarray
    num_committed: np.ndarray
    num_columns: np.ndarray
    failed: np.ndarray
    draft_failed: np.ndarray | None = None
    ended: np.ndarray | None = None


class CausalRun(SteppableRun):
    """Rows of a causal loop, of N items: their tokens, how far each is, and the phases of a step.
    ``callback``: called after every step with its number, the tokens and which are known.

    Attributes:
        bound: position before which rows wait for others (``advance``), or that of each item, int64
            [N] (``gen.samplers.search.resume``).
        tokens: tokens of all items, [N, T(, C)].
        slots: items of the rows.
        start: committed tokens of each row, int64 [b].
        round: forward passes of each row so far, int64 [b].
        last: last committed token of each row, [b, 1(, C)]; before position 0 anything, since the
            target puts its prompt there.
        recorder: statistics and traces.
        logprobs: log-probabilities of committed tokens; None where nobody asked for them.
    """

    def __init__(
        self,
        target: CausalTarget,
        rng: RNG,
        drafter: Drafter,
        trace: bool = False,
        callback: Callable | None = None,
    ):
        check_needs(drafter, target)
        self.began, self.callback = time.perf_counter(), callback
        self.target, self.rng, self.drafter = target, rng, drafter
        self.total, self.eos_token_id = target.length, target.space.eos_token_id
        self.bound: int | np.ndarray = self.total
        self.ends = RowEnds(target)
        self.device, self.on_host = target.device, target.device.type == "cpu"
        self.tokens = target.blank()
        # the same memory, where the host may write to it
        writable = self.tokens.ndim == 2 and self.on_host
        self.host_tokens = self.tokens.numpy() if writable else None
        self.slots = BatchSlots(target, followers=(*drafter.targets, *drafter.stores))
        self.start = np.zeros(target.rows, dtype=np.int64)
        self.round = self.start
        self.last = self.tokens[: target.rows, :1]
        self.num_steps = 0
        self.num_finished_tokens = np.zeros(len(self.tokens), dtype=np.int64)
        self.recorder = StatsRecorder(len(self.tokens), trace, drafter.window)
        count = target.sampling.logprobs
        self.logprobs = None if count is None else LogprobRecorder(len(self.tokens), count)
        self.graphs = StepGraphs.of(self)
        # constants of the last step, which hold as long as it has the same shape [b, W]
        self.shape = 0, 0
        self.column = self.row = self.full_widths = self.room = np.zeros(0, dtype=np.int64)
        self.all_valid = torch.zeros(0, dtype=torch.bool)

    def step(self) -> None:
        # 1. Positions of the next window of every row
        # 2. Draft its tokens, run one forward pass and verify
        if self.graphs is not None and not self.target.lacks_prompts:
            made = self.graphs.compute(self.recorded_step())
        else:
            step = self.next_step()
            made = compute(step, self.drafter, self.target, self.committed_tokens(), self.last)
        # 3. The one copy to the host, which decides about the course of the rows
        outcome = self.to_host(made)
        self.drafter.observe(made.step, outcome.num_accepted, outcome.num_drafted)
        # 4. Commit the accepted drafts and the token after them, up to the end of the row
        self.truncate_at_end(outcome)
        self.commit(made.verdict, outcome)
        self.record(made, outcome)
        del made  # the largest tensors of a step
        # 5. Advance, and give finished rows to waiting items
        self.move_on(outcome)
        self.report(self.callback)
        self.retire()

    def advance(self, block: int) -> None:
        if self.is_over:
            return
        # all unfinished rows stand at the bound of the last call
        self.bound = min((int(self.start.min()) // block + 1) * block, self.total)
        while not self.is_over and int(self.start.min()) < self.bound:
            self.step()
        self.bound = self.total

    def peek(self) -> Estimate:
        known = np.ones((len(self.tokens), self.total), dtype=bool)
        known[self.slots.items] = np.arange(self.total) < self.start[:, None]
        return Estimate(self.tokens.clone(), self.here(known), False)

    def follow(self, ancestors: np.ndarray, live: SlotChange) -> None:
        self.tokens.copy_(self.tokens[self.here(ancestors)])
        self.start, self.last = live.follow(self.start), live.follow(self.last)
        self.round = live.follow(self.round)
        states = self.ends.states
        self.ends.states = {i: states[a] for i, a in enumerate(ancestors.tolist()) if a in states}
        if self.recorder.traces is not None:
            traces = by_ancestor(self.recorder.traces, ancestors)
            self.recorder.traces = [list(trace) for trace in traces]

    def extend(self, change: SlotChange) -> None:
        self.start = change.extend(self.start, 0)
        self.round = change.extend(self.round, 0)
        self.last = change.extend(self.last, 0)

    def progress(self, items: Sequence[int]) -> tuple[Tensor, Tensor]:
        counts = dict.fromkeys(self.slots.waiting.tolist(), 0)
        counts |= dict(zip(self.slots.items.tolist(), self.start.tolist(), strict=True))
        known = np.array([counts.get(item, self.total) for item in items])
        at = self.here(np.asarray(items, dtype=np.int64))
        return self.tokens[at], self.here(np.arange(self.total) < known[:, None])

    @property
    def is_over(self) -> bool:
        return not len(self.slots) or bool(np.all(self.start >= self.total))

    @property
    def recorded(self) -> StatsRecorder:
        return self.recorder

    def output_of(self, item: int, seconds: float) -> SampleOutput:
        nfe = self.drafter.nfe
        own, tokens = self.recorder.of_item(item), self.tokens[item : item + 1]
        out = own.output(tokens, seconds, draft_nfe=None if nfe is None else [nfe[item]])
        if self.logprobs is None:
            return out
        return replace(out, logprobs=self.logprobs.of_item(item).output())

    def output(self) -> SampleOutput:
        seconds, nfe = time.perf_counter() - self.began, self.drafter.nfe
        out = self.recorder.output(self.tokens, seconds, draft_nfe=nfe)
        return out if self.logprobs is None else replace(out, logprobs=self.logprobs.output())

    def here(self, x: np.ndarray) -> Tensor:
        """Move an array to the target's device; nobody may write to it afterwards."""
        return torch.from_numpy(x) if self.on_host else to_device(x, self.device)

    def next_step(self) -> CausalStep:
        """Lay out the next window of every row.

        A column that does not exist repeats the row's first one, token and position, which changes
        nothing.
        """
        self.room = self._bounds() - self.start
        rooms = self.room.tolist()  # its least and most take less time than an array's
        width = min(self.drafter.window, max(rooms))
        self._lay_out(len(rooms), width)
        positions = self.start[:, None] + self.column
        widths, valid = self.full_widths, self.all_valid
        is_full = min(rooms) >= width
        if not is_full:
            exists = self.column < self.room[:, None]
            positions = np.where(exists, positions, self.start[:, None])
            valid, widths = self.here(exists), np.minimum(self.room, width)
        arrays = self.round, self.start, positions, self.room
        round, start, at, left = (self.here(x) for x in arrays)
        host, rows = (widths, self.start, self.slots.items, self.room), self.slots.rows
        return CausalStep(self.rng, rows, round, start, at, valid, *host, left, is_full)

    def recorded_step(self) -> CausalStep:
        """Describe the next step to its recording, which lays out the columns itself: with one copy
        to the device, and the columns of every step."""
        self.room = self._bounds() - self.start
        width = min(self.drafter.window, self.total)
        self._lay_out(len(self.room), width)
        round, start, left = self.here(np.stack([self.round, self.start, self.room]))
        columns, widths, slots = self.all_valid, np.minimum(self.room, width), self.slots
        host = widths, self.start, slots.items, self.room
        return CausalStep(self.rng, slots.rows, round, start, columns, columns, *host, left)

    def _lay_out(self, rows: int, width: int) -> None:
        """Make the constants of steps of this shape."""
        if self.shape != (rows, width):
            self.shape = rows, width
            self.column, self.row = np.arange(width)[None], np.arange(rows)
            self.full_widths = np.full(rows, width)
            self.all_valid = self.here(np.ones(self.shape, dtype=bool))

    def _bounds(self) -> int | np.ndarray:
        """Return the position before which all rows stop, or each of them, int64 [b]."""
        return self.bound if isinstance(self.bound, int) else self.bound[self.slots.items]

    def committed_tokens(self) -> Tensor:
        """Tokens of the rows, [b, T(, C)]."""
        every = len(self.slots) == self.tokens.shape[0]
        return self.tokens if every else self.tokens[self.slots.rows]

    def to_host(self, made: Computed) -> Outcome:
        """Copy the outcome of a step to the host and count what is to be committed."""
        step, draft, verdict = made.step, made.draft, made.verdict
        self._lay_out(*step.valid.shape)
        known: Any = made.columns.to_host(made.joined)
        counts, drafted = known["counts"][:, 0], known["drafted"]
        if verdict.num_committed is None:
            accepted, committed = counts, np.minimum(counts + 1, step.widths)
        else:
            accepted, committed = np.zeros_like(counts), np.minimum(counts, step.widths)
        columns = drafted.sum(1) + 1 if drafted.shape[1] else step.widths
        if verdict.path is None and draft.positions is None:
            columns = np.minimum(step.widths, columns)
        if draft.num_drafts is not None:  # masks behind the drafts
            drafted = drafted[:, : draft.num_drafts]
        num_drafted = drafted.sum(1) if drafted.shape[1] else accepted
        ids, failed, draft_failed = (known[x] for x in ("token_ids", "failed", "draft_failed"))
        counts = num_drafted, committed, columns
        return Outcome(accepted, drafted, ids, *counts, failed, draft_failed)

    def truncate_at_end(self, outcome: Outcome) -> None:
        """Cut what is committed off behind the first end or stop."""
        if self.eos_token_id is None:
            return
        accepted, committed = outcome.num_accepted, outcome.num_committed
        assert outcome.token_ids is not None, "latents have no eos token"
        items, start = self.slots.items, self.start
        kept = self.ends.tokens_to_end(items, start, outcome.token_ids, committed)
        outcome.ended = ended = kept > 0
        committed = np.where(ended, kept, committed)
        new = self.column < committed[:, None]
        # drafts behind an accepted end were neither accepted nor rejected
        drafted = outcome.drafted
        drafted = drafted & ((accepted < committed)[:, None] | new[:, : drafted.shape[1]])
        outcome.num_accepted = np.minimum(accepted, committed)
        outcome.num_committed, outcome.num_drafted = committed, drafted.sum(1)

    def refuse_failed(self, outcome: Outcome) -> None:
        """Refuse a token that is committed or drafted where the logits make no distribution.
        Positions behind a rejected draft may have none: nothing is drawn from them. Raises
        ``GenError``."""
        if np.count_nonzero(outcome.failed):
            failed = outcome.failed & (self.column < outcome.num_committed[:, None])
            self._refuse(self.target, failed)
        if outcome.draft_failed is not None and outcome.draft_failed.any():
            self._refuse(next(iter(self.drafter.targets), self.target), outcome.draft_failed)

    def _refuse(self, target: Target, failed: np.ndarray) -> None:
        position = np.where(failed.any(1), self.start + failed.argmax(1), -1)
        refuse_failed(target, self.slots.items, position)

    def commit(self, verdict: Verdict, outcome: Outcome) -> None:
        """Write the new tokens of the verdict, and remember the last one of each row. Raises
        ``GenError``: one stands at a position without a distribution, or is not allowed there."""
        self.refuse_failed(outcome)
        target, here, width = self.target, self.here, self.shape[1]
        chosen = verdict.tokens
        items, start, committed = self.slots.items, self.start, outcome.num_committed
        if target.is_history_dependent:
            new = here(self.column < committed[:, None])
            at = here(start[:, None] + self.column)
            target.refuse_illegal(chosen, at, new, verdict.columns)
        ids = outcome.token_ids
        if self.host_tokens is not None and ids is not None:
            counts = zip(items.tolist(), start.tolist(), committed.tolist(), strict=True)
            for i, (item, n, count) in enumerate(counts):
                self.host_tokens[item, n : n + count] = ids[i, :count]
            last = chosen if width == 1 else here(ids[self.row, committed - 1, None])
            self.last = self.unless_waiting(committed, last)
            return
        row, column = (self.column < committed[:, None]).nonzero()
        # a column that is committed exists, so that this is its position
        positions = start[row] + column
        tokens = chosen[here(row), here(column)]
        self.tokens[here(items[row]), here(positions)] = tokens
        if width > 1:
            chosen = chosen[here(self.row), here(committed - 1)][:, None]
        self.last = self.unless_waiting(committed, chosen)

    def unless_waiting(self, committed: np.ndarray, last: Tensor) -> Tensor:
        """Return the last tokens [b, 1(, C)], of rows that commit nothing the ones before."""
        if np.count_nonzero(committed) == len(committed):
            return last
        waiting = self.here(committed == 0).view(-1, *[1] * (last.ndim - 1))
        return torch.where(waiting, self.last, last)

    def record(self, made: Computed, outcome: Outcome) -> None:
        """Note the counts of a step, whose outcome is cut off at the end of the row; its
        log-probabilities and its trace if they are recorded."""
        step, verdict, output = made.step, made.verdict, made.output
        items, recorder, columns = self.slots.items, self.recorder, outcome.num_columns
        padding = (self.shape[1] - columns) * self.target.branches
        accepted, committed = outcome.num_accepted, outcome.num_committed
        computed = output.num_computed_tokens - padding
        counts = (computed, output.num_computed_positions, committed, accepted)
        ran = output.ran_network
        goes_on = self.room > 0
        if np.count_nonzero(goes_on) < len(goes_on):  # rows that wait are computed for nothing
            ran = goes_on if ran is None else goes_on & ran.cpu().numpy()
        recorder.add(items, *counts, outcome.num_drafted, ran)
        if self.logprobs is not None:
            self.logprobs.add(items, committed, verdict.tokens, verdict.path, output)
        if recorder.traces is None:
            return
        tokens = (verdict.tokens if outcome.token_ids is None else outcome.token_ids).tolist()
        is_chain = verdict.path is None and verdict.columns is None
        tree = None if is_chain else (step.positions, step.valid)
        counts = (items, self.start, columns, accepted, committed)
        for i, (item, n, w, a, c) in enumerate(zip(*(x.tolist() for x in counts), strict=True)):
            if not goes_on[i]:
                continue
            new = {n + k: tokens[i][k] for k in range(c)}
            if outcome.ended is not None and outcome.ended[i]:
                new |= dict.fromkeys(range(n + c, self.total), self.eos_token_id)
            window: list[int] = list(range(n, n + w))
            if tree is not None:  # branches share their positions
                window = sorted(set(tree[0][i][tree[1][i]].tolist()))
            recorder.add_trace(item, window, range(n, n + a), new)

    def move_on(self, outcome: Outcome) -> None:
        """Move every row behind its new tokens; one that ended is filled up with the eos token."""
        committed = outcome.num_committed
        self.start, self.round = self.start + committed, self.round + (self.room > 0)
        self.num_steps += 1
        ended, eos_token_id = outcome.ended, self.eos_token_id
        if ended is not None and eos_token_id is not None and ended.any():
            for i in ended.nonzero()[0]:
                self.tokens[self.slots.items[i], self.start[i] :] = eos_token_id
            self.start = np.where(ended, self.total, self.start)

    def report(self, callback: Callable | None) -> None:
        """Tell the callback how far all items are."""
        if callback is None:
            return
        finished = self.num_finished_tokens
        finished[self.slots.items] = self.start
        callback(
            {
                "step": self.num_steps,
                "done": int(finished.sum()),
                "total": len(finished) * self.total,
                "tokens": self.tokens,
                "known": self.here(np.arange(self.total) < finished[:, None]),
            }
        )

    def retire(self) -> None:
        """Give the rows that are finished to waiting items, or drop them."""
        if max(self.start.tolist()) < self.total:
            return
        done = self.start >= self.total
        change = self.slots.retire(done if self.graphs is None else self.graphs.leaving(done))
        if change is None:  # rows that have finished wait
            return
        self.start, self.round = change.follow(self.start, 0), change.follow(self.round, 0)
        self.last = change.follow(self.last)


class CausalSampler(Sampler):
    """Sampler that runs the causal loop (``gen.samplers.engine.causal_loop``)."""

    protocol = "causal"

    @property
    def opens(self) -> bool:
        """True where no item learns from finished ones (``scope: call``)."""
        return vars(self).get("scope", ITEM) == ITEM

    @abstractmethod
    def make_drafter(self, target: Any, draft: Any) -> Drafter:
        """Make the drafter of one call. ``draft``: target of the draft model, or of each where
        there are several; None without one. Raises ``GenError``: the target or the draft does not
        fit the parameters."""

    def __call__(
        self,
        target,
        rng: RNG,
        *,
        draft=None,
        canvas=None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> SampleOutput:
        run = CausalRun(target, rng, self.make_drafter(target, draft), trace, callback)
        while not run.is_over:
            run.step()
        return run.output()

    def begin(self, target, rng: RNG, *, draft=None, canvas=None, trace: bool = False) -> CausalRun:
        return CausalRun(target, rng, self.make_drafter(target, draft), trace)
