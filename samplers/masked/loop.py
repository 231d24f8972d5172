"""The masked loop: predict, propose, score, select, remask, stop. Every masked method is a choice
of its parts.

Per row and forward call: the law of all empty places is computed; a ``proposer`` puts an id at
each; a ``block_schedule`` says which places are at work; an ``order`` scores them; a ``selector``
says which are committed now, at least one; a ``remasker`` may empty or change what earlier steps
committed; a ``stop`` may end a row. Rows advance independently, each with its own block and its own
count of steps. One that is done makes room for the next item where the target has some waiting
(``Target.at_most``), or else leaves the batch. Nothing a row draws depends on another row.

A part is a function of one step (``masked_step.Step``), registered under its kind:

    proposer(now) -> ids [b, T]                      order(now) -> score [b, T]
    block_schedule(now) -> open bool [b, T], number of the block [b]; a row whose number changes
    begins a block. And what may be left out: the places that the schedule of steps counts [b, T],
    if they are more than those that are open
    selector(now) -> bool [b, T]                     stop(now, canvas) -> bool [b], ids [b, T] for
                                                     what such rows left empty
    remasker(now, count) -> places to empty bool [b, T], places to commit [b], and two things that
    may be left out: ids to put in the place of committed ones [b, T] (-1: none), and bool [b],
    which rows want another call in their block though it is full

Every call fills at least one place more than it empties, and nothing is emptied after ``steps``
calls of a block, so that there is an end. Calls that a remasker asks for in a full block come on
top of that: it must stop asking. Until it does, the row stays in that block.

A part that is a class has weights: it is made from the knobs and the device when a call of the
sampler begins.

A remasker function with the attribute ``shadow`` gets ``left_out``: the call has, beside the
canvas, one canvas more for each committed place of the block, with that place empty. It is one
call, and all of its places are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import RNG
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.core.token_space import TokenSpace
from gen.models.adapters.denoising_path import noise_size, walk
from gen.models.targets.block import Block
from gen.samplers.engine.host import may_be_any
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.parts.caches import with_cache
from gen.samplers.masked.step import MaskedStep, Memory, Seats, highest


class Revision(NamedTuple):
    """What a remasker returns; see the module."""

    removed: Tensor
    count: Tensor
    replaced: Tensor | None = None
    again: Tensor | None = None


class _Parts:
    """The functions that a sampler's knobs name, or others ``instead``, by the knob."""

    def __init__(
        self,
        params: MaskedSampler,
        space: TokenSpace,
        device: torch.device | str,
        instead: Mapping[str, Callable],
    ):
        self.order = registry.get(
            "order", params.order or ("random" if space.channels else "confidence")
        )
        for name, kind in (
            ("schedule", "schedule"),
            ("proposer", "proposer"),
            ("selector", "selector"),
            ("remasker", "remasker"),
            ("stop", "stop"),
            ("blocks", "block_schedule"),
        ):
            part = instead.get(name) or registry.get(kind, getattr(params, name))
            setattr(
                self, name, part(params, device) if isinstance(part, type) else part
            )  # a class has weights, read once per call
        self.revises = params.remasker != "none" or "remasker" in instead
        self.shadow = getattr(self.remasker, "shadow", False)


def decode_masked(
    target,
    rng: RNG,
    params: MaskedSampler,
    *,
    canvas: Tensor | None = None,
    trace: bool = False,
    callback: Callable | None = None,
    instead: Mapping[str, Callable] | None = None,
) -> SampleOutput:
    """Fills the empty places of ``canvas`` [B, T(, C)], by default all. ``instead``: functions in
    place of the parts that ``params`` name, such as ``{"selector": f}``, for samplers whose parts
    know more than a num_steps. Raises ``GenError`` for a canvas that the space does not allow.
    """
    began = time.perf_counter()
    space, batch, total, device = target.space, target.items, target.length, target.device
    parts = _Parts(params, space, device, instead or {})
    target = with_cache(target, params)
    if parts.shadow and isinstance(target, Block):
        raise GenError(
            f"sampler.remasker is {params.remasker!r}, which asks for the law of every place without"
            " its own id; a block model's cache holds one canvas per row; expected a remasker"
            " without that, or a masked model"
        )
    canvas = (
        space.empty(batch, device, target.model.dtype)
        if canvas is None
        else canvas.to(device).clone()
    )
    check_canvas(canvas, batch, target.legal, space)
    given = ~space.is_masked(canvas)
    wanted = (~given).sum(1)
    certainty = torch.zeros(batch, total, dtype=torch.float64, device=device)
    finished = torch.zeros_like(wanted, dtype=torch.bool)
    seats, memory, book, num_steps = Seats(target, wanted > 0), Memory(), _Book(batch, trace), 0
    round_ = torch.zeros_like(seats.rows)
    while len(rows := seats.rows):
        masked = space.is_masked(canvas[rows])
        committed = _at_work(~masked & ~given[rows], masked, memory) if parts.shadow else None
        step = MaskedStep(
            rng,
            rows,
            round_,
            space,
            params,
            canvas[rows],
            given[rows],
            masked,
            torch.ones_like(masked),
            None,
            None,
            memory,
            certainty[rows],
            num_prompt_tokens=_before(target),
        )
        prepare = getattr(target, "prepare", None)
        if prepare:  # a cache wants to know the block before the law
            _block(step, parts, wanted[rows])
            prepare(step)
        step.logprobs, step.raw_logprobs, step.left_out_logp, positions = _read(
            target, canvas[rows], committed, params
        )
        if prepare:
            step.fresh = target.fresh
        else:
            _block(step, parts, wanted[rows])
        if space.channels:
            step.proposed_tokens, step.logp = (
                step.canvas,
                torch.zeros(masked.shape, dtype=torch.float64, device=device),
            )
        else:
            step.proposed_tokens = torch.where(masked, parts.proposer(step), step.canvas)
            step.logp = (
                step.confidence_logprobs()
                .gather(-1, step.proposed_tokens[..., None])[..., 0]
                .double()
            )
        step.score = parts.order(step)
        eligible = step.eligible
        chosen = parts.selector(step) & eligible
        if may_be_any(~chosen.any(1)):
            chosen = torch.where(
                chosen.any(1, keepdim=True),
                chosen,
                highest(step.score, eligible, torch.ones_like(rows)),
            )
        revision = Revision(*parts.remasker(step, chosen.sum(1)))
        if parts.revises:  # what is emptied is made up for
            chosen = chosen | highest(
                step.score, eligible & ~chosen, revision.count - chosen.sum(1)
            )
        removed = revision.removed & ~step.is_last_step[:, None]
        proposed, changed, over = (
            step.proposed_tokens,
            torch.zeros_like(removed),
            torch.zeros_like(rows, dtype=torch.bool),
        )
        if space.channels:
            noise = rng.normal(rows, step.positions, "propose", None, noise_size(target.paths))
            proposed = step.canvas.clone()
            proposed[chosen] = walk(target.paths, step.logprobs[chosen], noise[chosen])[:, -1].to(
                canvas.dtype
            )
        if revision.replaced is not None:
            changed = step.remaskable & ~removed & (revision.replaced >= 0)
            proposed, chosen = torch.where(changed, revision.replaced, proposed), chosen | changed
        canvas[rows] = torch.where(
            chosen if proposed.ndim == 2 else chosen[..., None], proposed, canvas[rows]
        )
        if parts.revises:
            canvas[rows] = torch.where(removed, space.mask_token_id, canvas[rows])
            removed = removed | changed
        if not space.channels:
            certainty[rows] = torch.where(
                chosen,
                step.confidence_logprobs().gather(-1, proposed[..., None])[..., 0].double(),
                certainty[rows],
            )
            over, rest = parts.stop(step, canvas[rows])
            filling = over[:, None] & space.is_masked(canvas[rows])
            proposed, chosen = torch.where(filling, rest, proposed), chosen | filling
            canvas[rows] = torch.where(filling, rest, canvas[rows])
        book.add(seats.numbers, step, positions, chosen, proposed, removed)
        num_steps, round_ = num_steps + 1, round_ + 1
        done = ~space.is_masked(canvas[rows]).any(1)
        if revision.again is not None:
            memory["held"] = revision.again & ~over
            done = done & ~memory["held"]
        if callback:
            finished[rows] = done
            callback(_report(num_steps, canvas, given, space, finished if parts.revises else None))
        if moved := seats.leave(done):
            again, left = moved
            memory.renew(again)
            memory.keep(left)
            round_ = round_.masked_fill(again, 0)[left]
    return book.output(canvas, wanted.tolist(), time.perf_counter() - began)


def _before(target) -> Tensor | int:
    """Ids of the condition of each row [b], where a target has conditions."""
    lengths = getattr(target, "prompt_length", None)
    return 0 if lengths is None else lengths[: target.rows]


def _at_work(committed: Tensor, masked: Tensor, memory: Memory) -> Tensor:
    """Those of the ``committed`` places (bool [b, T]) that are in a block which goes on. Which that
    is, is known before the law is: one that begins has none."""
    open = memory.get("open", torch.zeros_like(committed))
    goes_on = (masked & open).any(1) | memory.get("held", torch.zeros_like(masked[:, 0]))
    return committed & open & goes_on[:, None]


def _read(
    target, canvas: Tensor, committed: Tensor | None, params: MaskedSampler
) -> tuple[Tensor, Callable | None, Tensor | None, int | Tensor]:
    """The law of a canvas [b, T], the raw law, and places computed per row: one call. If asked for,
    also what the law of each ``committed`` place (bool [b, T]) says of its id without it; 0 at the
    others."""
    if committed is None:
        logprobs, positions = target.predict(canvas)
        return logprobs, getattr(target, "raw", None), None, positions
    b, (row, at) = len(canvas), committed.nonzero(as_tuple=True)
    each = torch.arange(len(row), device=canvas.device)
    without = canvas[row]
    without[each, at] = target.space.mask_token_id
    logprobs, positions = target.predict(
        torch.cat([canvas, without]), of=torch.cat([torch.arange(b, device=canvas.device), row])
    )
    raw = target.raw() if params.confidence_on == "raw" else None
    left_out = torch.zeros(canvas.shape, dtype=torch.float64, device=canvas.device)
    left_out[row, at] = (logprobs if raw is None else raw)[b + each, at, canvas[row, at]].double()
    each = positions[:b] if isinstance(positions, Tensor) else positions
    return (
        logprobs[:b],
        lambda: (target.raw() if raw is None else raw)[:b],
        left_out,
        each * (1 + committed.sum(1)),
    )


def _block(step: MaskedStep, parts: _Parts, wanted: Tensor) -> None:
    """Which block every row is in, and how far in it. ``wanted`` [b]: empty places at the start of
    all."""
    step.is_first_step = step.steps_in_block = step.num_masked_at_start = torch.zeros_like(
        step.rows
    )
    asks, before = (
        "held" in step.memory,
        dict(step.memory),
    )  # whether a remasker may have asked for another call in a full block
    held = step.recall("held", torch.zeros_like(step.rows, dtype=torch.bool)) if asks else None
    step.open, number, *counted = parts.blocks(step)
    if asks and bool(held.any()):  # to the schedule their block is over, and it may have gone on

        def keep(name, new):
            return torch.where(held.view(-1, *[1] * (new.ndim - 1)), before[name], new)

        step.memory.update(
            {
                name: keep(name, x)
                for name, x in step.memory.items()
                if name in before and x is not before[name]
            }
        )
        step.open, number = keep("open", step.open), keep("block", number)
    step.is_first_step = number != step.recall("block", torch.full_like(number, -1))
    count = (step.masked & step.fresh & (counted[0] if counted else step.open)).sum(1)
    step.steps_in_block = torch.where(step.is_first_step, 0, step.recall("since", count))
    step.num_masked_at_start = torch.where(step.is_first_step, count, step.recall("wanted", count))
    steps = torch.ceil(
        step.params.steps * step.num_masked_at_start.double() / wanted - 1e-9
    ).clamp_min(1)
    if step.params.block_steps:
        steps = torch.full_like(steps, step.params.block_steps)
    step.progress = ((step.steps_in_block + 1) / steps).clamp_max(1)
    step.is_last_step = step.progress >= 1
    share = torch.where(step.is_last_step, 0.0, parts.schedule(step.progress, step.params.exponent))
    stay = (step.num_masked_at_start * share + 1e-9).floor().long()
    stay = torch.where(share > 0, stay.clamp_min(1), stay)
    step.quota = (count - torch.minimum(stay, count - 1)).clamp_min(0)
    step.memory.update(
        block=number, open=step.open, since=step.steps_in_block + 1, wanted=step.num_masked_at_start
    )


def _report(
    step: int, canvas: Tensor, given: Tensor, space: TokenSpace, over: Tensor | None
) -> dict:
    """``over`` bool [B]: which rows are, where what others hold may be emptied or changed again and
    is not known yet."""
    known = filled = ~space.is_masked(canvas)
    if over is not None:
        known = given | over[:, None]
    return {
        "step": step,
        "done": int(filled.sum()),
        "total": filled.numel(),
        "tokens": canvas,
        "known": known,
    }


class _Book:
    """Statistics and traces per row."""

    def __init__(self, batch: int, trace: bool):
        self.batch, self.calls = batch, []
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(batch)] if trace else None

    def add(
        self,
        numbers: list[int],
        step: MaskedStep,
        positions: int | Tensor,
        chosen: Tensor,
        proposed: Tensor,
        removed: Tensor,
    ) -> None:
        """One step of the items ``numbers`` [b], each of which had so many ``places`` computed.
        They are counted in the end, when nobody waits."""
        self.calls.append((numbers, positions))
        for i, row in enumerate(numbers if self.traces is not None else []):
            at, window, gone = (
                x[i].nonzero()[:, 0].tolist() for x in (chosen, step.masked | chosen, removed)
            )
            self.traces[row].append(
                TraceStep(
                    window, [], dict(zip(at, proposed[i, chosen[i]].tolist(), strict=True)), gone
                )
            )

    def output(self, canvas: Tensor, wanted: list[int], seconds: float) -> SampleOutput:
        memory = (
            torch.cuda.max_memory_allocated(canvas.device) if canvas.device.type == "cuda" else None
        )
        nfe, computed = [0] * self.batch, [0] * self.batch
        for numbers, positions in self.calls:
            for row, count in zip(
                numbers,
                positions.tolist() if isinstance(positions, Tensor) else [positions] * len(numbers),
                strict=True,
            ):
                nfe[row] += 1
                computed[row] += count
        stats = [
            Stats(
                nfe=n,
                tokens=w,
                tokens_computed=c,
                mean_acceptance_length=w / n if n else 0.0,
                seconds=seconds / len(canvas),
                peak_memory=memory,
            )
            for n, w, c in zip(nfe, wanted, computed, strict=True)
        ]
        return SampleOutput(canvas, stats, self.traces)


def check_canvas(canvas: Tensor, batch: int, legal: Tensor, space: TokenSpace) -> None:
    """Raises ``GenError`` for a canvas of another shape or with an id that may not stand where it
    does."""
    shape = (batch, space.length, *([space.channels] if space.channels else []))
    if canvas.shape != shape:
        raise GenError(f"the canvas has shape {tuple(canvas.shape)}; expected {shape}")
    if space.channels:
        return
    known = ~space.is_masked(canvas)
    inside = (canvas >= 0) & (canvas < legal.shape[1])
    fine = (
        legal[torch.arange(space.length, device=canvas.device), canvas.clamp(0, legal.shape[1] - 1)]
        & inside
    )
    if (
        space.eos_token_id is not None
    ):  # what lies behind the end is given, also where no end may be drawn
        fine |= canvas == space.eos_token_id
    if bool((known & ~fine).any()):
        row, at = (known & ~fine).nonzero()[0].tolist()
        raise GenError(
            f"the canvas holds id {int(canvas[row, at])} at place {at} of row {row}, which is not"
            " legal there"
        )
