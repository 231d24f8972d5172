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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.captured import Captured, bucket
from gen.samplers.engine.rows import RowStore
from gen.samplers.engine.step import Computed, compute
from gen.samplers.engine.step_context import CausalStep


@dataclass
class StepGraph:
    """Recorded step.

    Attributes:
        static: tensors that it reads.
        replay: computes it: what the host reads, in one tensor; the tokens of the verdict; and the
            next state of the drafter.
        made: what was computed as it was recorded, of which the shapes are right.
    """

    static: list[Tensor]
    replay: Callable[[], Sequence[Tensor]]
    made: Computed


class StepGraphs:
    """Recorded steps of one run.

    Args:
        run: the run (``gen.samplers.engine.causal_loop.CausalRun``).
        captured: recorded forward passes of its model.
    """

    def __init__(self, run: Any, captured: Captured):
        self.run, self.captured, self.most = run, captured, len(run.slots)
        self._graphs: dict[Any, StepGraph] = {}
        self._memory: tuple[Any, int] = (None, 0)  # that they were recorded on

    @classmethod
    def of(cls, run: Any) -> StepGraphs | None:
        """Return the recorded steps of a run; None where a step cannot be recorded."""
        target, drafter = run.target, run.drafter
        captured = target.model.graphs if isinstance(target.model, ModelAdapter) else None
        if not isinstance(captured, Captured) or not drafter.captures or drafter.targets:
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
        """Replay a step.

        Args:
            step: context of the step, whose positions and columns are not read.
        """
        run, cache = self.run, self.run.target.cache
        names = [(store, name) for store in run.drafter.stores for name in _tensors(store)]
        given = [step.rows, step.round, step.start, step.left, run.last, run.committed_tokens()]
        given += [*run.target.row_inputs, *(store[name] for store, name in names)]
        if self._memory != (cache.memory, cache.memory.branch_slots):
            self._memory, self._graphs = (cache.memory, cache.memory.branch_slots), {}
        key = (step.valid.shape[1], *(x.shape for x in given))
        if key not in self._graphs:
            self._graphs[key] = self._record(step, given, names)
            self._memory = cache.memory, cache.memory.branch_slots
        graph = self._graphs[key]
        for static, x in zip(graph.static, given, strict=True):
            static.copy_(x)
        joined, tokens, *states = graph.replay()
        for (store, name), x in zip(names, states, strict=True):
            store[name] = x
        made = graph.made
        positions, valid = made.step.positions, made.step.valid
        step = replace(step, positions=positions, valid=valid)
        return replace(made, step=step, verdict=replace(made.verdict, tokens=tokens), joined=joined)

    def _record(
        self, step: CausalStep, given: list[Tensor], names: list[tuple[RowStore, str]]
    ) -> StepGraph:
        """Record a step; its drafter and its target are left as they were."""
        target, drafter, width = self.run.target, self.run.drafter, step.valid.shape[1]
        made: list[Computed] = []

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            rows, round, start, left, last, tokens, *more = tensors
            count = len(target.row_inputs)
            target.row_inputs = more[:count]
            for (store, name), x in zip(names, more[count:], strict=True):
                store[name] = x
            column = torch.arange(width, device=start.device)
            valid = column < left[:, None]
            positions = start[:, None] + torch.where(valid, column, 0)
            nothing: Any = None  # a drafter that reads values on the host fails here
            here = CausalStep(
                step.rng, rows, round, start, positions, valid, *[nothing] * 4, left=left
            )
            made[:] = [compute(here, drafter, target, tokens, last)]
            states = [store[name] for store, name in names]
            return [made[0].columns.joined(), made[0].verdict.tokens, *states]

        before = target.row_inputs
        static = [x.contiguous().clone() for x in given]
        try:
            with self.captured.recording():
                replay = self.captured.recorder.record(run, static)
        finally:
            target.row_inputs = before
        return StepGraph(static, replay, made[0])


def _tensors(store: RowStore) -> list[str]:
    """List the entries of a store that are tensors."""
    return [name for name, x in store.items() if isinstance(x, Tensor)]
