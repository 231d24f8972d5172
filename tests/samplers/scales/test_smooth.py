"""Mixtures of codes in place of tokens (``more_smooth``), against the published formula."""

from __future__ import annotations

import torch
from tabular_scales import TWELVE, TabularScales, scales_target

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.targets.scales import ScalesTarget

CODES, KEYS = 5, [3, 4, 9]
SAMPLING = SamplingParams(temperature=0.8, top_k=3, guidance_scale=2.0)
next_scale = registry.get("sampler", "next_scale")


def committed(monkeypatch, warmth: float = 0.27) -> tuple[list, list]:
    """Vectors that the sampler adds at every scale, and those of the formula."""
    model = TabularScales.with_params(SAMPLING, CODES)
    added, wanted = [], []
    predict, commit = ScalesTarget.predict, ScalesTarget.commit_vectors

    def reading(self, rows=None):
        output, scale = predict(self, rows), self.scale
        ratio = scale / (len(TWELVE) - 1)
        here = torch.arange(12)[self.here]
        at = (here[:, None] * CODES + torch.arange(CODES)).flatten()
        u = CounterRNG(KEYS).uniform(torch.arange(3), at.expand(3, -1), "more_smooth", None)
        gumbel = -torch.log(-torch.log(u.view(3, len(here), CODES)))
        logits = output.logprobs * (1 + ratio) + gumbel
        soft = (logits / max(warmth * (1 - 0.95 * ratio), 0.005)).softmax(-1)
        wanted.append(soft @ model.quantize.embedding.weight)
        return output

    def noting(self, vectors):
        added.append(vectors)
        commit(self, vectors)

    monkeypatch.setattr(ScalesTarget, "predict", reading)
    monkeypatch.setattr(ScalesTarget, "commit_vectors", noting)
    target = scales_target(model, SAMPLING, [0, 1, 0])
    out = next_scale(more_smooth=True)(target, CounterRNG(KEYS), trace=True)
    assert torch.equal(out.tokens, model.quantize.encode(target.f_hat))
    assert [len(trace) for trace in out.traces] == [3] * 3
    assert all(len(step.committed) for trace in out.traces for step in trace)
    return added, wanted


def test_every_scale_adds_the_mixtures_of_the_formula(monkeypatch):
    added, wanted = committed(monkeypatch)
    assert len(added) == len(TWELVE)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(added, wanted, strict=True))


def test_control_another_temperature_is_found(monkeypatch):
    added, wanted = committed(monkeypatch, warmth=0.5)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(added, wanted, strict=True))


def test_it_promises_no_distribution():
    assert next_scale(more_smooth=True).guarantee == "approximate"
    assert next_scale().guarantee == "same_distribution"
