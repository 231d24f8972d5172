"""Recorder of forward passes and steps that needs no GPU. Not a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gen.bench.estimate.host_waits import HostWaits
from gen.models.adapters.captured import Captured, Pass


class TraceRecorder:
    """Freezes what Python does in a pass: a trace holds operations on tensors and nothing else, so
    a value that was read on the host, or a shape, is that of the first pass for ever.

    Args:
        meter: the meter that is on, by which tensors say that they lie on an accelerator; None
            where they say that they lie on the CPU.

    Attributes:
        traces: number of passes that were traced.
        replays: number of passes that ran from a trace.
        reads: what the passes read on the host, or copied from there.
    """

    def __init__(self, meter: HostWaits | None = None) -> None:
        self.meter, self.traces, self.replays = meter, 0, 0
        self.reads: list[str] = []

    def record(self, run: Pass, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """See ``gen.models.adapters.captured.Recorder``."""
        meter = self.meter or HostWaits()
        waits, uploads = len(meter.waits), meter.uploads
        with torch.no_grad():
            trace = make_fx(run, tracing_mode="real")(list(inputs))
        self.traces += 1
        self.reads += meter.waits[waits:] + ["upload"] * (meter.uploads - uploads)

        def replay() -> Any:
            self.replays += 1
            with torch.no_grad(), torch._C.DisableTorchFunction():  # nothing watches a replay
                return trace(list(inputs))

        return replay


def recorded(meter: HostWaits | None = None) -> Captured:
    """Passes of a model that are traced on first use and replayed from then on."""
    return Captured(TraceRecorder(meter))
