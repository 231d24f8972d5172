"""Share of the time outside of forward passes (``gen bench --overhead``).

    decoding = passes of the model + passes of draft models + outside

``decoding`` is the wall time of the sampler's loop (``Stats.seconds``), without loading, prompts
and media. A pass begins where the sampler's target calls the adapter of a network and ends where
it returns: masks, keys and values are part of it. Everything else is outside: drafts, noise, the
distribution of logits, verification, statistics. Heads of latents and drafters without a model of
their own are outside too.

On an accelerator the clock waits for the device before and after each pass, so that the host does
not work ahead: ``outside`` is then an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.pipeline.request import GenerationRequest


@dataclass
class PassClock:
    """Seconds of forward passes, added up.

    Attributes:
        decoding: wall time of the loops.
        passes: of the model.
        drafts: of draft models; networks made of the model's own layers are draft models.
    """

    decoding: float = 0.0
    passes: float = 0.0
    drafts: float = 0.0

    def per_item(self, items: int) -> dict[str, float]:
        """Return the parts of the time per item, in seconds, and the share outside of passes."""
        outside = self.decoding - self.passes - self.drafts
        parts = {
            "decoding_seconds": self.decoding / items,
            "pass_seconds": self.passes / items,
            "draft_seconds": self.drafts / items,
            "outside_seconds": outside / items,
        }
        return {**parts, "outside_share": outside / self.decoding}

    def run(self, pipe: Any, variant: Any, items: Sequence[Any]) -> Any:
        """Decode a batch as ``pipe.generate`` does, and time its forward passes.

        Raises:
            GenError: a model is no ``ModelAdapter``.
        """
        spec = pipe.defaults.complete_sampler(variant.spec)
        request = GenerationRequest(items, spec, *pipe.resolve(variant.spec, variant.sampling))
        prepared = pipe.prepare(request)
        adapters = [target.model for target in (prepared.target, *prepared.drafts)]
        with self.watch(adapters):
            out = pipe.run(prepared)
        self.decoding += sum(s.seconds for s in out.stats)
        return out

    @contextmanager
    def watch(self, adapters: Sequence[Any]) -> Iterator[None]:
        """Time the passes of these adapters inside, the model's first.

        Raises:
            GenError: one of them is no ``ModelAdapter``.
        """
        for adapter in adapters:
            if not isinstance(adapter, ModelAdapter):
                raise GenError(
                    f"--overhead does not support {type(adapter).__name__}; expected a ModelAdapter"
                )
        network, running = adapters[0].model, False
        wait = _waiting_for(adapters[0].device)

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(method)
            def call(adapter: ModelAdapter, *args: Any, **more: Any) -> Any:
                nonlocal running
                if running:  # a pass that calls another one
                    return method(adapter, *args, **more)
                running = True
                wait()
                began = time.perf_counter()
                try:
                    out = method(adapter, *args, **more)
                    wait()
                    return out
                finally:
                    seconds, running = time.perf_counter() - began, False
                    if adapter.model is network:
                        self.passes += seconds
                    else:
                        self.drafts += seconds

            return call

        # of classes and not of instances, since adapters are copied with all that they hold
        kinds = {type(adapter): dict(vars(type(adapter))) for adapter in adapters}
        methods = {(kind, name): getattr(kind, name) for kind in kinds for name in kind.passes}
        try:
            for (kind, name), method in methods.items():
                setattr(kind, name, timed(method))
            yield
        finally:
            for kind, name in methods:
                if name in kinds[kind]:
                    setattr(kind, name, kinds[kind][name])
                else:
                    delattr(kind, name)


def _waiting_for(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for a device; the CPU has nothing to wait for."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
