"""Whole steps of the causal loop, recorded once and replayed: on a GPU as CUDA graphs.

What a step reads and writes lies at addresses that stay: the rows' numbers and tokens, the state of
the drafter, keys and values (``gen.models.adapters.captured``). A graph computes the drafts, the
forward pass, log-probabilities, the verdict and the next state; the host copies one tensor of
counts and tokens, and decides which rows end, join or leave.

A step is recorded for a number of rows and of columns. So that few of these come up, rows that have
finished wait until half of the rows have, or take the next item. Steps that compute prompts run
without a graph. Where the drafter reads values on the host (``Drafter.captures``), or the run notes
traces or log-probabilities or looks back at tokens, forward passes alone are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gen.core.lookup import bucket
from gen.samplers.engine.recorded import RecordedSteps
from gen.samplers.engine.step import Computed, compute
from gen.samplers.engine.step_context import CausalStep

if TYPE_CHECKING:  # it imports transformers
    from gen.core.rng import RNG
    from gen.models.adapters.captured import Captured


class StepGraphs(RecordedSteps):
    """Recorded steps of one run (``gen.samplers.engine.causal_loop.CausalRun``), beside the
    recorded forward passes of its model."""

    def __init__(self, run: Any, captured: Captured):
        super().__init__(captured, run.target, run.drafter.stores)
        self.run, self.most = run, len(run.slots)
        self._memory: tuple[Any, int] = (None, 0)  # that they were recorded on

    @classmethod
    def of(cls, run: Any) -> StepGraphs | None:
        """Return the recorded steps of a run; None where a step cannot be recorded."""
        target, drafter = run.target, run.drafter
        captured = target.captured
        if captured is None or not drafter.captures or drafter.targets:
            return None
        looks_back = target.is_history_dependent or target.gives_raw or target.hidden_layers
        differs = target.item_sampling is not None or target.router is not None
        noted = run.recorder.traces is not None or run.logprobs is not None
        return None if looks_back or differs or noted else cls(run, captured)

    def leaving(self, done: np.ndarray) -> np.ndarray:
        """Choose the finished rows that are given up, bool [b]: those that take the next items, and
        of the others as many as leave half, a quarter, ... of the rows there were."""
        waiting = len(self.run.slots.waiting)
        numbers = done.nonzero()[0]
        left = len(done) - max(0, len(numbers) - waiting)
        leave = len(done) - bucket(left, self.most) if left else len(numbers)
        chosen = np.zeros_like(done)
        chosen[numbers[: min(len(numbers), waiting) + max(0, leave)]] = True
        return chosen

    def compute(self, step: CausalStep) -> Computed:
        """Replay a step, of whose context the positions and columns are not read."""
        run, width = self.run, step.valid.shape[1]
        given = [step.rows, step.round, step.start, step.left, run.last, run.committed_tokens()]
        if self._memory != self._memory_now():
            self.recordings.clear()
        (joined, tokens), made = self.replay(given, partial(self._computed, step.rng, width), width)
        self._memory = self._memory_now()  # a recording may have had it grow
        positions, valid = made.step.positions, made.step.valid
        step = replace(step, positions=positions, valid=valid)
        return replace(made, step=step, verdict=replace(made.verdict, tokens=tokens), joined=joined)

    def _computed(
        self, rng: RNG, width: int, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Computed]:
        """Compute a step of so many columns: what the host reads of it, the tokens of the verdict,
        and all of it, of which the shapes are right in a replay."""
        rows, round, start, left, last, tokens = tensors
        column = torch.arange(width, device=start.device)
        valid = column < left[:, None]
        positions = start[:, None] + torch.where(valid, column, 0)
        nothing: Any = None  # a drafter that reads values on the host fails here
        step = CausalStep(rng, rows, round, start, positions, valid, *[nothing] * 4, left=left)
        made = compute(step, self.run.drafter, self.target, tokens, last)
        return [made.columns.joined(), made.verdict.tokens], made

    def _memory_now(self) -> tuple[Any, int]:
        memory = self.target.cache.memory
        return memory, memory.branch_slots
