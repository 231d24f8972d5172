"""Recorder of forward passes that needs no GPU. Not a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gen.models.adapters.captured import Captured, Pass


class TraceRecorder:
    """Freezes what Python does in a pass: a trace holds operations on tensors and nothing else, so
    a value that was read on the host, or a shape, is that of the first pass for ever.

    Attributes:
        traces: number of passes that were traced.
        replays: number of passes that ran from a trace.
    """

    def __init__(self) -> None:
        self.traces = self.replays = 0

    def record(self, run: Pass, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
        """See ``gen.models.adapters.captured.Recorder``."""
        with torch.no_grad():
            trace = make_fx(run, tracing_mode="real")(list(inputs))
        self.traces += 1

        def replay() -> Tensor:
            self.replays += 1
            with torch.no_grad():
                return trace(list(inputs))

        return replay


def recorded() -> Captured:
    """Passes of a model that are traced on first use and replayed from then on."""
    return Captured(TraceRecorder())
