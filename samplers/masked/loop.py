"""Masked loop: every masked method is a choice of parts in this loop.

Each step, for all rows of the batch: one forward pass gives the distribution of every masked
position. A ``proposer`` draws a token for each of them. A ``block_schedule`` says which positions
are open. An ``order`` scores the positions. A ``selector`` chooses those that are committed, at
least one per row. A ``remasker`` may mask or change what earlier steps committed. A ``stop`` may
end a row. Rows advance independently, each with its own block and its own count of steps. A row
that is finished takes the next waiting item, or leaves the batch
(``gen.samplers.engine.rows``). Nothing a row draws depends on another row.

A part is a function of one step (``gen.samplers.masked.step.MaskedStep``), registered under its
kind:

    block_schedule(step)   open positions [b, T], and the number of the block [b]: a row whose
                           number changes begins a block. Optionally the positions [b, T] that the
                           schedule of steps counts, where they are more than the open ones
    proposer(step)         tokens [b, T]
    order(step)            score [b, T]
    selector(step)         positions to commit, bool [b, T]
    remasker(step, count)  fields of ``Revision``; ``count`` [b] is what the selector commits
    stop(step, canvas)     rows that are over, bool [b], and tokens [b, T] for what they left masked

A part that is a class has weights: it is made from the sampler's parameters and the device when a
call begins. A part that reads more than its phase provides declares it
(``gen.samplers.masked.step.needs``): a remasker may ask for ``left_out_logp``, for which the
forward pass has one more canvas per committed position of the block, with that position masked. All
positions of those canvases are counted.

Termination: every step commits at least one position more than it masks again, and nothing is
masked again after ``steps`` steps of a block. Steps that a remasker asks for in a full block come
on top of that; the row stays in that block until the remasker stops asking.

A token space with an automaton (``gen.contracts.constraint``): log-probabilities are those of the
tokens that may stand at each position, and what a step commits is checked one position after the
other (``gen.samplers.masked.constrained``).

The host reads one tensor per step: which rows are done. Where no part reads more, and the model's
forward passes are recorded, so are whole steps, which are replayed (``recorded_steps``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.lookup import bucket
from gen.core.registry import registry
from gen.core.rng import RNG
from gen.core.sampler import require_constraint_kept
from gen.core.stats import SampleOutput
from gen.models.adapters.denoising_path import noise_size, walk
from gen.models.targets.block import Block
from gen.models.targets.masked import MaskedTarget
from gen.samplers.engine.failed import failed_draws
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.recorded import RecordedSteps
from gen.samplers.engine.stats import Counts, StatsRecorder
from gen.samplers.masked.announced import announcing
from gen.samplers.masked.batch import CanvasBatch, begin_batch, outcome_of, report
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.constrained import Changes, settle
from gen.samplers.masked.part_set import PartSet, Revision, make_parts
from gen.samplers.masked.parts.caches import with_cache
from gen.samplers.masked.progress import progress_of
from gen.samplers.masked.step import (
    ANNOUNCED,
    BlockProgress,
    CanvasView,
    MaskedStep,
    Prediction,
    TokenProposal,
    at_least_one,
    highest,
    needs_of,
)


def decode_masked(
    target,
    rng: RNG,
    params: MaskedSampler,
    *,
    canvas: Tensor | None = None,
    trace: bool = False,
    callback: Callable | None = None,
    overrides: Mapping[str, Callable] | None = None,
    followers: Sequence = (),
) -> SampleOutput:
    """Fill the masked positions of a canvas.

    Args:
        target: masked model with its prompts.
        rng: random numbers by item and position.
        params: the sampler.
        canvas: tokens or latents [N, T(, C)], masked where one is wanted; None: masked everywhere.
        trace: whether to record the positions of every step.
        callback: called after every step with what ``report`` returns.
        overrides: parts in place of the named ones, by parameter, such as ``{"selector": f}``.
        followers: targets and row stores of those parts, which follow the rows of the batch.

    Raises:
        GenError: the token space does not allow the canvas, or a part does not fit the target.
    """
    began = time.perf_counter()
    run = begin_run(target, rng, params, canvas, trace, overrides or {}, followers)
    steps, most = recorded_steps(run), len(run.batch.slots)
    while len(run.batch.slots):
        if steps is not None and can_replay(run.batch, most):
            replay(run, steps)
        else:
            step = view_canvas(run)  # 1. canvas view
            predict(run, step)  # 2. block progress  3. forward pass
            finish_step(run, step)
        if callback:
            callback(report(run.batch, run.known))
    seconds = time.perf_counter() - began
    return run.recorder.output(run.batch.canvas, seconds, run.batch.num_masked.tolist())


def finish_step(run: MaskedRun, step: MaskedStep) -> None:
    """Carry out the phases of a step that come after its forward pass."""
    change, outcome = change_canvas(run, step)  # 4. to 9.
    record(run, step, change)  # 10. record
    run.batch.retire(outcome)  # 11. retire


def change_canvas(run: MaskedRun, step: MaskedStep) -> tuple[CanvasChange, Tensor]:
    """Carry out the phases of a step from its proposal to its stop.

    Returns:
        The change, and what the host reads of the step (``outcome_of``).
    """
    step.proposal = propose(run, step)  # 4. propose
    step.proposal = replace(step.proposal, score=run.parts.order(step))  # 5. score
    selected = select(run, step)  # 6. select
    revision = remask(run, step, selected)  # 7. remask
    change = commit(run, step, selected, revision)  # 8. commit
    change, stopped = stop(run, step, change)  # 9. stop
    return change, outcome_for_host(run, step, change, revision, stopped)


@dataclass
class MaskedRun:
    """State of one call of the loop.

    Attributes:
        batch: canvases and rows.
        rng: random numbers by item and position.
        params: the sampler.
        parts: parts that ``params`` names.
        recorder: statistics and traces.
        committed_logp: log-probability of each token when it was committed, float64 [N, T].
        finished: items that are over, bool [N].
        constants: see ``MaskedStep.constant``.
    """

    batch: CanvasBatch
    rng: RNG
    params: MaskedSampler
    parts: PartSet
    recorder: StatsRecorder
    committed_logp: Tensor
    finished: Tensor
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def known(self) -> Tensor:
        """Positions whose token does not change any more, bool [N, T]."""
        if self.parts.revises:
            return self.batch.prefilled | self.finished[:, None]
        return ~self.batch.target.space.is_masked(self.batch.canvas)


@dataclass(frozen=True)
class CanvasChange:
    """Changes of the canvas in one step.

    Attributes:
        tokens: tokens, or latents, [b, T(, C)]; those at ``committed`` are written.
        committed: positions that are written, bool [b, T].
        removed: positions that are masked again or whose token is replaced, bool [b, T].
    """

    tokens: Tensor
    committed: Tensor
    removed: Tensor


def begin_run(
    target,
    rng: RNG,
    params: MaskedSampler,
    canvas: Tensor | None,
    trace: bool = False,
    overrides: Mapping[str, Callable] = MappingProxyType({}),
    followers: Sequence = (),
) -> MaskedRun:
    """Look up the parts, set up the cache and give the first items a row; see ``decode_masked``."""
    if params.hold_end and not target.space.ends:
        raise GenError(
            "sampler.hold_end is true, which needs an id that ends a row (TokenSpace.ends); this"
            " model has none; expected false"
        )
    require_constraint_kept(params, target.space)
    parts = make_parts(params, target.space, target.device, overrides)
    target = with_cache(target, params)
    if ANNOUNCED in needs_of(registry.get("cache_policy", params.cache)):
        parts = announcing(parts, params)
    if parts.remasker_reads_left_out and isinstance(target, Block):
        raise GenError(
            f"sampler.remasker is {params.remasker!r}, which needs the log-probability of every"
            " token with its own position masked; a block model's cache holds one canvas per row;"
            " expected a remasker without that need, or a masked model"
        )
    if parts.reads_states:
        require_states(target, params, parts.proposer)
    batch = begin_batch(target, canvas, followers)
    shape, device = batch.prefilled.shape, target.device
    committed_logp = torch.zeros(shape, dtype=torch.float64, device=device)
    finished = torch.zeros(len(batch.canvas), dtype=torch.bool, device=device)
    recorder = StatsRecorder(target.items, trace)
    return MaskedRun(batch, rng, params, parts, recorder, committed_logp, finished)


def require_states(target, params: MaskedSampler, proposer: Any) -> None:
    """Have a target give hidden states. Raises ``GenError`` where it cannot."""
    if not isinstance(target, MaskedTarget) or params.cache != "none":
        raise GenError(
            f"sampler.proposer is {params.proposer!r}, which reads the hidden states of all"
            f" positions; sampler.cache is {params.cache!r} and the target"
            f" {type(target).__name__}; expected a masked model of tokens and no cache"
        )
    target.require_states(proposer.digest, f"sampler.proposer {params.proposer!r}")


def view_canvas(run: MaskedRun, at: Sequence[Tensor] | None = None) -> MaskedStep:
    """Begin a step with the canvas as it is.

    Args:
        run: the run.
        at: rows and their ``step_index``, long [b] each; None for those of the batch.
    """
    batch = run.batch
    rows, step_index = (batch.rows, batch.step_index) if at is None else at
    tokens = batch.canvas[rows]
    view = CanvasView(
        tokens,
        batch.prefilled[rows],
        batch.target.space.is_masked(tokens),
        run.committed_logp[rows],
        batch.target.num_prompt_tokens,
    )
    space = batch.target.space
    step = MaskedStep(run.rng, rows, step_index, space, run.params, batch.memory, view)
    step.constants = run.constants
    return step


def predict(run: MaskedRun, step: MaskedStep) -> None:
    """Run the forward pass of a step, and note its cost."""
    *counts, partial = forward(run, step)
    run.recorder.add(run.batch.slots.items, *counts, partial=partial)


def forward(run: MaskedRun, step: MaskedStep) -> tuple[Counts, Counts, Tensor | None]:
    """Build the records ``block`` and ``prediction`` with one forward pass.

    The block comes first, since a cache decides by it what to compute. A block schedule that reads
    log-probabilities comes after the forward pass; it takes no cache.

    Returns:
        Positions of its own that each row had computed, those with padding, and rows whose pass
        computed a part of the canvas, bool [b]; None where none does.
    """
    left_out = left_out_positions(step) if run.parts.remasker_reads_left_out else None
    if not run.parts.blocks_read_logprobs:
        step.block = block_progress(run, step)
    run.batch.target.prepare(step)
    partial = None
    if left_out is None:
        output = run.batch.target.predict(step.canvas)
        fresh = torch.ones_like(step.masked) if output.fresh is None else output.fresh
        partial = None if output.fresh is None else ~fresh.all(1)
        states = output.states if run.parts.reads_states else None
        step.prediction = Prediction(
            output.logprobs, output.raw, fresh, under=output.under, states=states
        )
        counts = output.num_computed_tokens, output.num_computed_positions
    else:
        step.prediction, counts = predict_with_left_out(run.batch.target, step, left_out)
    if run.parts.blocks_read_logprobs:
        step.block = block_progress(run, step)
    return counts[0], counts[1], partial


def left_out_positions(step: MaskedStep) -> Tensor:
    """Committed positions of blocks that go on: bool [b, T].

    They are those of the step before: a block that begins now has none.
    """
    masked, committed = step.masked, ~step.masked & ~step.prefilled
    was_open = step.recall("open", torch.zeros_like(masked))
    goes_on = (masked & was_open).any(1) | step.recall("stays", torch.zeros_like(masked[:, 0]))
    return committed & was_open & goes_on[:, None]


def predict_with_left_out(
    target, step: MaskedStep, left_out: Tensor
) -> tuple[Prediction, tuple[Counts, Counts]]:
    """Run the canvases, and one more canvas per position of ``left_out`` with it masked.

    Args:
        target: the masked model.
        step: step with its canvas view.
        left_out: committed positions, bool [b, T].

    Returns:
        The prediction with ``left_out_logp``; and positions of its own that each row had computed,
        and those with padding.
    """
    canvas, device = step.canvas, step.canvas.device
    b, (row, position) = len(canvas), left_out.nonzero(as_tuple=True)
    extra = torch.arange(len(row), device=device)
    without = canvas[row]
    without[extra, position] = target.space.mask_token_id
    rows = torch.cat([torch.arange(b, device=device), row])
    output = target.predict(torch.cat([canvas, without]), rows)
    raw = output.raw() if step.params.confidence_on == "raw" else None
    judged = output.logprobs if raw is None else raw
    logp = torch.zeros(left_out.shape, dtype=torch.float64, device=device)
    logp[row, position] = judged[b + extra, position, canvas[row, position]].double()

    def of_rows(counts: Counts) -> Counts:
        """Count the canvases of each row; all of them compute the same."""
        return (counts[:b] if isinstance(counts, Tensor) else counts) * (1 + left_out.sum(1))

    prediction = Prediction(
        output.logprobs[:b],
        lambda: (output.raw() if raw is None else raw)[:b],
        torch.ones_like(step.masked),
        logp,
        output.under,
    )
    counts = of_rows(output.num_computed_tokens), of_rows(output.num_computed_positions)
    return prediction, counts


def block_progress(run: MaskedRun, step: MaskedStep) -> BlockProgress:
    """Find the block of every row and how many positions the schedule commits in it now."""
    params, memory = run.params, step.memory
    is_open, number, counted = block_of_rows(run.parts, step)
    is_first_step = number != step.recall("block", torch.full_like(number, -1))
    count = (step.masked & counted).sum(1)
    steps_in_block = torch.where(is_first_step, 0, step.recall("steps_in_block", count))
    at_start = torch.where(is_first_step, count, step.recall("num_masked_at_start", count))
    total = run.batch.num_masked[step.rows]
    steps = torch.ceil(params.steps * at_start.double() / total - 1e-9).clamp_min(1)
    if params.block_steps:
        steps = torch.full_like(steps, params.block_steps)
    memory.update(
        block=number, open=is_open, steps_in_block=steps_in_block + 1, num_masked_at_start=at_start
    )
    progress = progress_of(run.parts, params, count, at_start, steps_in_block, steps)
    return BlockProgress(is_open, is_first_step, **progress)


def block_of_rows(parts: PartSet, step: MaskedStep) -> tuple[Tensor, Tensor, Tensor]:
    """Ask the block schedule, and keep rows in their block that a remasker wants to stay there.

    Returns:
        Open positions [b, T], number of the block [b], positions that the schedule of steps
        counts [b, T].
    """
    memory, before = step.memory, dict(step.memory)
    is_open, number, *counted = parts.blocks(step)
    if "stays" in before:
        stays = step.recall("stays", torch.zeros_like(step.masked[:, 0]))
        if bool(stays.any()):
            # to the schedule the full block is over, and it may have gone on to the next

            def unless_stays(name: str, new: Tensor) -> Tensor:
                return torch.where(stays.view(-1, *[1] * (new.ndim - 1)), before[name], new)

            changed = [n for n in memory if n in before and memory[n] is not before[n]]
            memory.update({name: unless_stays(name, memory[name]) for name in changed})
            is_open, number = unless_stays("open", is_open), unless_stays("block", number)
    return is_open, number, counted[0] if counted else is_open


def propose(run: MaskedRun, step: MaskedStep) -> TokenProposal:
    """Draw a token for every masked position; latents are drawn once they are selected."""
    if step.space.channels:
        logp = torch.zeros(step.masked.shape, dtype=torch.float64, device=step.masked.device)
        return TokenProposal(step.canvas, logp)
    tokens = torch.where(step.masked, run.parts.proposer(step), step.canvas)
    logprobs = step.logprobs
    if run.params.hold_end:
        step.hold_back(run.batch.target.space.ends)
    # the log-probabilities of the step may have changed
    logp = step.confidence_logprobs().gather(-1, tokens[..., None])[..., 0].double()
    return TokenProposal(tokens, logp, logprobs=logprobs)


def select(run: MaskedRun, step: MaskedStep) -> Tensor:
    """Ask the selector, and take the best position of a row where it takes none: bool [b, T]."""
    return at_least_one(step, run.parts.selector(step))


def remask(run: MaskedRun, step: MaskedStep, selected: Tensor) -> Revision:
    """Ask the remasker; ``selected`` bool [b, T] are the positions that the selector chose."""
    return Revision(*run.parts.remasker(step, selected.sum(1)))


def commit(run: MaskedRun, step: MaskedStep, selected: Tensor, revision: Revision) -> CanvasChange:
    """Write the selected tokens to the canvas, and mask or replace what the remasker says.

    Args:
        run: the run.
        step: step with its proposal.
        selected: positions that the selector chose, bool [b, T].
        revision: outcome of the remasker.
    """
    canvas, rows, space = run.batch.canvas, step.rows, step.space
    if run.parts.revises:
        # as many more are committed as the remasker asks for
        more = revision.count - selected.sum(1)
        selected = selected | highest(step.score, step.eligible & ~selected, more)
    removed, replaced = revision.removed & ~step.is_last_step[:, None], None
    tokens = denoise(run, step, selected) if space.channels else step.proposed_tokens
    if revision.replaced is not None:
        replaced = step.remaskable & ~removed & (revision.replaced >= 0)
        tokens = torch.where(replaced, revision.replaced, tokens)
    settled = None
    if run.batch.target.canvas_rule is not None:
        edited = torch.zeros_like(selected) if replaced is None else replaced
        changes = Changes(tokens, selected, removed, edited)
        settled = settle(run.batch.target, step, step.canvas, changes, run.parts.takes_likeliest)
        tokens, replaced = settled.tokens, None if replaced is None else settled.replaced
    if replaced is not None:
        selected = selected | replaced
    written = selected if tokens.ndim == 2 else selected[..., None]
    canvas[rows] = torch.where(written, tokens, canvas[rows])
    if run.parts.revises:
        assert space.mask_token_id is not None, "latents have no remasker"
        canvas[rows] = torch.where(removed, space.mask_token_id, canvas[rows])
        removed = removed if replaced is None else removed | replaced
    if not space.channels:
        logp = step.confidence_logprobs().gather(-1, tokens[..., None])[..., 0].double()
        if settled is not None:
            logp = torch.where(settled.logp.isnan(), logp, settled.logp)
        run.committed_logp[rows] = torch.where(selected, logp, run.committed_logp[rows])
    return CanvasChange(tokens, selected, removed)


def denoise(run: MaskedRun, step: MaskedStep, selected: Tensor) -> Tensor:
    """Canvas [b, T, C] with the end of the denoising path at selected positions (bool [b, T])."""
    paths = run.batch.target.paths
    noise = run.rng.normal(step.rows, step.positions, "propose", None, noise_size(paths))
    latents = step.canvas.clone()
    drawn = walk(paths, step.logprobs[selected], noise[selected])[:, -1]
    latents[selected] = drawn.to(latents.dtype)
    return latents


def stop(run: MaskedRun, step: MaskedStep, change: CanvasChange) -> tuple[CanvasChange, Tensor]:
    """Ask the stop which rows are over, and fill what they left masked.

    Returns:
        The change with what was filled, and the rows that are over, bool [b].
    """
    if step.space.channels:
        return change, torch.zeros_like(step.rows, dtype=torch.bool)
    canvas, rows = run.batch.canvas, step.rows
    stopped, rest = run.parts.stop(step, canvas[rows])
    filling = stopped[:, None] & step.space.is_masked(canvas[rows])
    tokens = torch.where(filling, rest, change.tokens)
    if run.batch.target.canvas_rule is not None and may_be_any(filling):
        none = torch.zeros_like(filling)
        filled = Changes(tokens, filling, none, none)
        likeliest = run.parts.takes_likeliest
        tokens = settle(run.batch.target, step, canvas[rows], filled, likeliest).tokens
    canvas[rows] = torch.where(filling, tokens, canvas[rows])
    return CanvasChange(tokens, change.committed | filling, change.removed), stopped


def record(run: MaskedRun, step: MaskedStep, change: CanvasChange) -> None:
    """Note what the step changed, where traces are recorded."""
    items, recorder = run.batch.slots.items, run.recorder
    if recorder.traces is None:
        return
    for row, item in enumerate(items.tolist()):
        positions, window, removed = (
            x[row].nonzero()[:, 0].tolist()
            for x in (change.committed, step.masked | change.committed, change.removed)
        )
        tokens = change.tokens[row, change.committed[row]].tolist()
        committed = dict(zip(positions, tokens, strict=True))
        recorder.add_trace(item, window, [], committed, removed)


def outcome_for_host(
    run: MaskedRun, step: MaskedStep, change: CanvasChange, revision: Revision, stopped: Tensor
) -> Tensor:
    """Find the rows that are done, and committed tokens that came from no distribution: see
    ``outcome_of``."""
    done = ~step.space.is_masked(run.batch.canvas[step.rows]).any(1)
    if revision.again is not None:
        step.memory["stays"] = revision.again & ~stopped
        done = done & ~step.memory["stays"]
    run.finished[step.rows] = done
    return outcome_of(done, change.committed & failed_draws(change.tokens, step.logprobs))


def recorded_steps(run: MaskedRun) -> RecordedSteps | None:
    """Return the recorded steps of a run, from canvas view to stop; None where a step reads values
    on the host."""
    target, parts = run.batch.target, run.parts
    if not isinstance(target, MaskedTarget) or not target.captures or not parts.captures:
        return None
    captured = target.captured
    if captured is None or parts.remasker_reads_left_out or run.recorder.traces is not None:
        return None
    written = run.batch.canvas, run.committed_logp, run.finished
    return RecordedSteps(captured, target, (run.batch.memory,), written)


def can_replay(batch: CanvasBatch, most: int) -> bool:
    """Return True where parts have made their memory of all rows, and the rows are all of the
    ``most``, a half, a quarter, ...: of other numbers forward passes alone are replayed."""
    rows = len(batch.slots)
    return bool(batch.memory) and not batch.memory.fresh and bucket(rows, most) == rows


def replay(run: MaskedRun, steps: RecordedSteps) -> None:
    """Replay a step, and retire rows."""

    def step_at(at: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Counts, Counts]]:
        step = view_canvas(run, at)
        computed, positions, _ = forward(run, step)
        _, outcome = change_canvas(run, step)
        by_row = [computed] if isinstance(computed, Tensor) else []  # prompts of several lengths
        return [outcome, *by_row], (computed, positions)

    batch = run.batch
    (outcome, *by_row), counts = steps.replay([batch.rows, batch.step_index], step_at)
    computed, positions = counts
    if by_row:
        computed = by_row[0].clone()  # the next replay writes it again
    run.recorder.add(batch.slots.items, computed, positions)
    batch.retire(outcome)
