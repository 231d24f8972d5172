"""Wall time of passes and steps of the built-in image model, inflated, against a minimal network of
the same mathematics (``gen.bench.card.minimal``)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gen.bench.card.minimal import MODEL, SLOTS, Minimal, shape_of
from gen.bench.card.parity import Codes, loaded, spec_of
from gen.bench.card.timing import averaged, captured, interleaved, launches, wait
from gen.core.errors import Interrupt
from gen.core.memory import free_memory
from gen.models.load.inflate import inflate, parse_size
from gen.pipeline.request import GenerationRequest

PAST = 100  # tokens before those of a timed pass
BEGIN, STEPS = 3, 16  # steps of a run before the clock, and all of them
DTYPE = "bfloat16"


class Wall:
    """Measurements of one size and option at a time, since two models may not fit.

    In all of them ``size`` is that of the image model, ``option`` one of the model or none, and
    ``rows`` those of a pass, two of an image by guidance.

    Args:
        device: device that is measured.
    """

    def __init__(self, device: str):
        self.device = device
        self.written: tuple[str, tempfile.TemporaryDirectory] | None = None
        self.kept: tuple[tuple[str, str], Any] | None = None

    def pipe(self, size: str, option: str) -> Any:
        """Return the pipeline of the inflated image model, whose weights the device draws."""
        if self.kept is None or self.kept[0] != (size, option):
            self.kept = None
            free_memory()
            modality = Codes()  # a model by name would be compared with those of all modalities
            modality.models = {"causal": str(self._model(size))}
            self.kept = (size, option), loaded(modality, self.device, DTYPE, option)
        return self.kept[1]

    def _model(self, size: str) -> Path:
        """Write the inflated model, and remove the one before."""
        if self.written is None or self.written[0] != size:
            self.written = None
            folder = tempfile.TemporaryDirectory(prefix="gen-card-")
            model = Path(folder.name) / MODEL
            inflate(MODEL, parse_size(size, "size"), model, device=self.device)
            self.written = size, folder
        return Path(self.written[1].name) / MODEL

    def pass_of(self, size: str, option: str, rows: int, width: int) -> Callable[[], object]:
        """Return gen's forward pass of ``width`` tokens of as many rows, behind ``PAST`` others."""
        pipe, spec = self.pipe(size, option), spec_of(width)
        items = pipe.plan(pipe.modality.example_prompts(1, 0), 1, 0)
        adapter = pipe.prepare(GenerationRequest(items, spec, *pipe.resolve(spec))).target.model
        cache = adapter.new_cache(SLOTS)
        ids = torch.zeros(rows, PAST + width, dtype=torch.long, device=self.device)
        positions = torch.arange(PAST + width, device=self.device).expand(rows, -1)
        adapter.forward(ids[:, :PAST], positions[:, :PAST], cache)
        return lambda: adapter.forward(ids[:, PAST:], positions[:, PAST:], cache)

    def steps(self, size: str, option: str, rows: int, width: int, number: int = STEPS) -> float:
        """Decode for some steps, drafts and verification included, and return the milliseconds of a
        step."""
        pipe, stamps = self.pipe(size, option), []

        def callback(info: dict[str, Any]) -> None:
            if len(stamps) in (BEGIN, number):
                wait(self.device)
            stamps.append(time.perf_counter())
            if len(stamps) > number:
                raise Interrupt

        items = pipe.plan(pipe.modality.example_prompts(rows // 2, 0), 1, 0)
        pipe.generate(items, spec_of(width), callback=callback)
        assert len(stamps) > number, "an image takes more steps"
        return (stamps[number] - stamps[BEGIN]) / (number - BEGIN) * 1e3

    def shape(self, size: str, option: str, rows: int, width: int, repeats: int) -> dict[str, Any]:
        """Time a pass of the minimal network and a step of gen in turn, then passes of gen alone:
        the caches of all three may not fit."""
        step = partial(self.steps, size, option, rows, width)
        step()  # warms up
        minimal = Minimal(shape_of(size), self.device, getattr(torch, DTYPE))
        cache = minimal.new_cache(rows)
        ids = torch.zeros(rows, width, dtype=torch.long, device=self.device)
        positions = torch.arange(PAST, PAST + width, device=self.device)
        run = partial(minimal.forward, ids, positions, cache)
        arms = {"minimal": averaged(run, self.device)}
        if self.device.startswith("cuda"):
            arms["minimal, graph"] = averaged(captured(run), self.device)
        found = interleaved({**arms, "step": step}, repeats)
        least = min(found[name]["ms"] for name in arms)
        del arms, run, minimal, cache
        free_memory()
        one = averaged(self.pass_of(size, option, rows, width), self.device)
        found |= interleaved({"pass": one}, repeats)
        ratios = {f"{name} / least minimal": found[name]["ms"] / least for name in ("step", "pass")}
        return {**found, **ratios}

    def launches(self, size: str, option: str, rows: int, width: int) -> dict[str, float]:
        """Count the launches of a pass and of a step."""
        steps = partial(self.steps, size, option, rows, width)
        steps()  # graphs are captured once
        counts = [launches(partial(steps, number), self.device) for number in (8, STEPS)]
        one = self.pass_of(size, option, rows, width)
        one()
        return {"pass": launches(one, self.device), "step": (counts[1] - counts[0]) / (STEPS - 8)}

    def decode(
        self, size: str, option: str, batch: int, window: int | str, repeats: int
    ) -> dict[str, Any]:
        """Decode whole images with ``autoregressive`` and ``speculative_jacobi``, in turn, and
        return the times of the batch, and the ratios of passes and of times."""
        pipe, passes = self.pipe(size, option), {}
        items = pipe.plan(pipe.modality.example_prompts(batch, 0), 1, 0)

        def arm(width: int | str) -> Callable[[], float]:
            spec = spec_of(width)
            passes[spec["name"]] = counted = []

            def timed() -> float:
                began = time.perf_counter()
                stats = pipe.generate(items, spec).stats  # whose tokens the host has
                counted.append(max(s.nfe for s in stats))
                return (time.perf_counter() - began) * 1e3

            timed()  # warms up
            return timed

        found = interleaved({spec_of(w)["name"]: arm(w) for w in (1, window)}, repeats)
        fewer, faster = (a / b for a, b in (
            [median(each[1:]) for each in passes.values()],
            [each["ms"] for each in found.values()],
        ))  # fmt: skip
        ratios = {"fewer passes": fewer, "faster": faster, "faster / fewer": faster / fewer}
        return {**found, **ratios}
