"""A job without a model: a toy modality of one-line texts, a pipeline for it, and what tests of
folders ask of both."""

from __future__ import annotations

import hashlib
import types
from pathlib import Path

import pytest
import torch

from gen.config.job import make_job
from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.stats import Stats, TraceStep
from gen.jobs.run import run_job
from gen.store.ledger import RUNTIME, read_rows

PROMPTS = ["alpha", "beta", "gamma"]


class Toy:
    """A modality of one-line texts."""

    name, extension, media_kind, default_sampling, kept = "toy", "txt", "data", {}, ""
    also, formats = (), ()
    models, default_samplers, masked_params = {}, {"causal": "speculative_jacobi"}, {}

    def condition(self, prompt):
        if "!" in prompt:
            raise GenError(f"prompt {prompt!r} holds '!'")
        return prompt

    def save(self, media, path, info):
        if media == "unsavable":
            raise ValueError("no such format")
        path.write_text(f"{media} {sorted(info)}")

    def keep(self, media, path):
        self.save(media, path, {})

    def is_path(self, media):
        return isinstance(media, (str, Path))

    def load(self, path):
        return path.read_text()

    def check(self, media, prompt):
        return Verdict(prompt in media, bool(media), "looked")

    def judge(self, media, condition):
        return self.check(media, condition.text or "")

    def media_part(self, condition):
        return ""


class Pipe:
    """Media that depend on prompt and seed alone. ``limit``: items that fit in; ``bad``: prompts
    that fail."""

    def __init__(self, limit=99, bad=(), oom=torch.OutOfMemoryError):
        self.modality, self.limit, self.bad, self.oom, self.batches = Toy(), limit, bad, oom, []

    def prompt_lengths(self, items, sampler):
        return [0] * len(items)

    def guarantee(self, sampler):
        return sampler.guarantee

    def turns(self, sampler):
        return 1

    def plan(self, prompts, num_samples, seed):
        for p in prompts:
            self.modality.condition(p)
        items = [(p, seed + j) for p in prompts for j in range(num_samples)]
        return [
            types.SimpleNamespace(
                index=i, prompt=p, seed=s, max_new_tokens=None, given=None, adapter=None
            )
            for i, (p, s) in enumerate(items)
        ]

    def generate(
        self, items, sampler, sampling, *, trace=False, callback=None, start=None, max_batch=None
    ):
        self.batches.append([i.prompt for i in items])
        if len(items) > self.limit:
            raise self.oom("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes")
        for item in items:
            if item.prompt in self.bad:
                raise KeyError(item.prompt)
        callback({"step": 1, "done": 4, "total": 4})
        media = [
            f"{i.prompt}"
            f" {hashlib.sha256(repr((i.prompt, i.seed, sampler)).encode()).hexdigest()[:8]}"
            for i in items
        ]
        stats = [
            Stats(
                nfe=3,
                tokens=4,
                tokens_computed=9,
                positions_computed=9,
                mean_acceptance_length=4 / 3,
                seconds=0.5,
            )
            for _ in items
        ]
        traces = [[TraceStep([0, 1], [0], {0: 7})] for _ in items] if trace else None
        return types.SimpleNamespace(
            media=media,
            stats=stats,
            traces=traces,
            logprobs=None,
            items=items,
            modality="toy",
            model="toy-model",
            model_options={},
            served=None,
            grid=(),
        )

    def load(self, modality, *, model, device, dtype, compile):
        assert (modality, model, device, dtype) == ("toy", None, "cpu", "float32")
        return self


@pytest.fixture
def toy(monkeypatch):
    """Registers the toy modality, and a gallery that only counts."""
    registry.discover()
    monkeypatch.setitem(registry._kinds["modality"], "toy", Toy)

    def write_gallery(folder: Path) -> Path:
        (folder / "index.html").write_text(f"{len(read_rows(folder))} items")
        return folder / "index.html"

    monkeypatch.setattr("gen.gallery.write.write_gallery", write_gallery)
    monkeypatch.setattr("gen.gallery.write.preview_of", lambda path, folder, row: None)


def job(out: Path, **keys):
    return make_job(
        {"modality": "toy", "prompts": PROMPTS, "sampler": "sjd", "out": str(out), **keys},
        where="test",
    )


def run(out: Path, pipe: Pipe | None = None, **keys):
    pipe = pipe or Pipe()
    return run_job(job(out, **keys), load=pipe.load), pipe


def files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir() if p.suffix == ".txt"}


def leftovers(out: Path) -> list[str]:
    """What only a run at work leaves."""
    return [p.name for p in out.rglob("*") if p.name.startswith(".") or p.name == "_work"]


def steady(out: Path) -> list[dict]:
    """The rows without what differs from run to run."""
    return [{k: v for k, v in r.items() if k not in RUNTIME} for r in read_rows(out)]
