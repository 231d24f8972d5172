"""Steps of a decoding loop that are recorded once and replayed: on a GPU as CUDA graphs.

A step is recorded as a function of tensors: those that the loop gives it, what its forward pass
reads of the rows, and the state of the method (``RowStore``). Before a replay they are copied to
addresses that stay. What Python decided as the step was recorded holds for all replays, so it may
depend on nothing but the shapes of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # it imports transformers
    from gen.models.adapters.captured import Captured
    from gen.samplers.engine.rows import RowStore

Step = Callable[[Sequence[Tensor]], tuple[list[Tensor], Any]]


@dataclass
class Recording:
    """Recorded step.

    Attributes:
        static: tensors that it reads.
        replay: computes it: the step's tensors, then the state after it.
        state: stores and names of that state.
        made: what else the step made as it was recorded.
    """

    static: list[Tensor]
    replay: Callable[[], Sequence[Tensor]]
    state: list[tuple[int, str]]
    made: Any


class RecordedSteps:
    """Recorded steps of one run.

    Args:
        captured: recorded forward passes of the model.
        target: the model with its rows, which has ``row_inputs``.
        stores: state of the method, of which steps read and set tensors.
        written: tensors that steps write to where they lie.
    """

    def __init__(
        self,
        captured: Captured,
        target: Any,
        stores: Sequence[RowStore] = (),
        written: Sequence[Tensor] = (),
    ):
        self.captured, self.target, self.stores, self.written = captured, target, stores, written
        self.recordings: dict[Hashable, Recording] = {}

    def replay(
        self, given: Sequence[Tensor], step: Step, key: Hashable = None
    ) -> tuple[Sequence[Tensor], Any]:
        """Replay a step; the first one with tensors of such shapes is recorded.

        Args:
            given: tensors that it reads.
            step: computes it from tensors like ``given``. It returns tensors, and anything else
                that all replays have in common.
            key: what it depends on beside the shapes.

        Returns:
            The step's tensors, which the next replay writes again, and the rest.
        """
        state = self._state()
        inputs = [*given, *self.target.row_inputs, *(self.stores[n][name] for n, name in state)]
        key = (key, tuple(state), *(x.shape for x in inputs))
        if key not in self.recordings:
            self.recordings[key] = self._record(step, inputs, len(given), state)
        found = self.recordings[key]
        for static, x in zip(found.static, inputs, strict=True):
            static.copy_(x)
        tensors = found.replay()
        own = len(tensors) - len(found.state)
        for (n, name), x in zip(found.state, tensors[own:], strict=True):
            self.stores[n][name] = x
        return tensors[:own], found.made

    def _record(
        self, step: Step, inputs: list[Tensor], own: int, state: list[tuple[int, str]]
    ) -> Recording:
        """Record a step, of which the first ``own`` inputs are given; the target, and what steps
        write to, are left as they were."""
        before, written = self.target.row_inputs, [x.clone() for x in self.written]
        rows = own + len(before)
        after: list[tuple[int, str]] = []
        made: list[Any] = []

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.target.row_inputs = tensors[own:rows]
            for (n, name), x in zip(state, tensors[rows:], strict=True):
                self.stores[n][name] = x
            found, rest = step(tensors[:own])
            after[:], made[:] = self._state(), [rest]
            return [*found, *(self.stores[n][name] for n, name in after)]

        static = [x.contiguous().clone() for x in inputs]
        try:
            with self.captured.recording():
                replay = self.captured.recorder.record(run, static)
        finally:
            self.target.row_inputs = before
            for x, kept in zip(self.written, written, strict=True):
                x.copy_(kept)
        return Recording(static, replay, after, made[0])

    def _state(self) -> list[tuple[int, str]]:
        """List the entries of the stores that are tensors."""
        stores = enumerate(self.stores)
        return [(n, name) for n, s in stores for name, x in s.items() if isinstance(x, Tensor)]
