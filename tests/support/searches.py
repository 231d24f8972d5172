"""Samplers without draws on models in closed form."""

from __future__ import annotations

from tabular import TabularCausal, causal_target

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams

PLAIN = SamplingParams()


def decode(spec, space, sampling=PLAIN, context=(0, 1, 2), **more):
    model = TabularCausal(space.vocab_size, low=0.0)
    target = causal_target(model, space, sampling, list(context))
    return resolve_sampler(spec)[0](target, CounterRNG(range(len(context))), **more)
