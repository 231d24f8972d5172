"""Masked runs that can be stepped (``gen.samplers.engine.stepping``).

A step ends with the forward pass of the next one: its distributions are the estimate of the masked
positions that ``peek`` returns, and the next step goes on from them. A search therefore costs no
forward pass beyond those of its particles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gen.core.rng import RNG
from gen.core.stats import SampleOutput
from gen.models.adapters.denoising_path import noise_size, walk
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import SlotChange
from gen.samplers.engine.stats import StatsRecorder
from gen.samplers.engine.stepping import Estimate, SteppableRun, by_ancestor
from gen.samplers.masked.batch import check_canvas, report
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.constrained import check_completable
from gen.samplers.masked.loop import begin_run, finish_step, predict, view_canvas
from gen.samplers.masked.step import MaskedStep, Prediction

R = TypeVar("R")


class SteppedMasked(SteppableRun):
    """Masked run between its steps.

    Args:
        target: masked model with its prompts.
        rng: random numbers by item and position.
        params: the sampler.
        canvas: tokens or latents [N, T(, C)], masked where one is wanted; None: masked everywhere.
        trace: whether to record the positions of every step.
        callback: called after every step.

    Attributes:
        next: the next step with its prediction; None where it is not made yet.
    """

    def __init__(
        self,
        target: Any,
        rng: RNG,
        params: MaskedSampler,
        canvas: Tensor | None = None,
        trace: bool = False,
        callback: Callable | None = None,
    ):
        self.began, self.callback = time.perf_counter(), callback
        self.run = begin_run(target, rng, params, canvas, trace)
        self.slots, self.rng = self.run.batch.slots, rng
        self.next: MaskedStep | None = None

    def step(self) -> None:
        step, self.next = self._predicted(), None
        finish_step(self.run, step)
        if self.callback:
            self.callback(report(self.run.batch, self.run.known))

    def advance(self, block: int) -> None:
        passes = 0
        while passes < block and not self.is_over:
            self.step()
            passes += 1
        if not self.is_over:
            self._predicted()

    def peek(self) -> Estimate:
        batch, space = self.run.batch, self.run.batch.target.space
        tokens = batch.canvas.clone()
        known = self.run.known.clone()
        if not self.is_over:
            step, rows = self._predicted(), batch.rows
            rest = self._latents(step) if space.channels else step.logprobs.argmax(-1)
            masked = step.masked[..., None] if space.channels else step.masked
            tokens[rows] = torch.where(masked, rest.to(tokens.dtype), tokens[rows])
        return Estimate(tokens, known, True)

    def follow(self, ancestors: np.ndarray, live: SlotChange) -> None:
        run, batch = self.run, self.run.batch
        index = to_device(ancestors, batch.canvas.device)
        for x in (batch.canvas, run.committed_logp, run.finished):
            x.copy_(x[index])
        batch.step_index = live.follow(batch.step_index)
        if run.recorder.traces is not None:
            traces = by_ancestor(run.recorder.traces, ancestors)
            run.recorder.traces = [list(trace) for trace in traces]
        run.rng = self.rng
        step, self.next = self.next, None
        if step is None or self.is_over:
            return
        assert live.source is not None, "the rows of a search are named one by one"
        assert step.prediction is not None, "a pending step has its prediction"
        rows = to_device(live.source, batch.canvas.device)
        self.next = view_canvas(run)
        self.next.block = None if step.block is None else _gathered(step.block, rows)
        self.next.prediction = _of_rows(step.prediction, rows)

    def put(self, items: np.ndarray, canvas: Tensor) -> np.ndarray:
        batch = self.run.batch
        target, at = batch.target, to_device(items, batch.canvas.device)
        check_canvas(canvas, len(items), target.legal, target.space)
        check_completable(target, canvas)
        batch.canvas[at] = canvas.to(batch.canvas)
        batch.prefilled[at] = ~target.space.is_masked(batch.canvas[at])
        batch.num_masked[at] = (~batch.prefilled[at]).sum(1)
        return (batch.num_masked[at] > 0).cpu().numpy()

    def extend(self, change: SlotChange) -> None:
        batch = self.run.batch
        batch.step_index = change.extend(batch.step_index, 0)

    def progress(self, items: Sequence[int]) -> tuple[Tensor, Tensor]:
        at = to_device(np.asarray(items, dtype=np.int64), self.run.batch.canvas.device)
        return self.run.batch.canvas[at], self.run.known[at]

    @property
    def recorded(self) -> StatsRecorder:
        return self.run.recorder

    def output_of(self, item: int, seconds: float) -> SampleOutput:
        batch = self.run.batch
        own, tokens = self.run.recorder.of_item(item), batch.canvas[item : item + 1]
        return own.output(tokens, seconds, [int(batch.num_masked[item])])

    def output(self) -> SampleOutput:
        batch, seconds = self.run.batch, time.perf_counter() - self.began
        return self.run.recorder.output(batch.canvas, seconds, batch.num_masked.tolist())

    def _predicted(self) -> MaskedStep:
        """Return the next step with its prediction, which is made once."""
        if self.next is None:
            self.next = view_canvas(self.run)
            predict(self.run, self.next)
        return self.next

    def _latents(self, step: MaskedStep) -> Tensor:
        """Draw latents [b, T, C] for all positions as an estimate, with noise of its own."""
        paths = self.run.batch.target.paths
        noise = self.run.rng.normal(
            step.rows, step.positions, "estimate", step.step_index, noise_size(paths)
        )
        return walk(paths, step.logprobs, noise)[..., -1, :]


def _gathered(record: R, rows: Tensor) -> R:
    """Return a record of tensors [b, ...] with the given rows, long [n]."""
    names = [f.name for f in fields(record)]  # type: ignore[arg-type]
    tensors = {name: getattr(record, name)[rows] for name in names}
    return replace(record, **tensors)  # type: ignore[type-var]


def _of_rows(prediction: Prediction, rows: Tensor) -> Prediction:
    """Return the prediction of the given rows, long [n]."""
    raw, under, left_out = prediction.raw_logprobs, prediction.under, prediction.left_out_logp
    states = prediction.states
    return Prediction(
        prediction.logprobs[rows],
        None if raw is None else lambda: raw()[rows],
        prediction.fresh[rows],
        None if left_out is None else left_out[rows],
        None if under is None else lambda row, at, legal: under(rows[row], at, legal),
        None if states is None else states.of_rows(rows),
    )
