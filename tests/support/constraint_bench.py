"""Constrained token spaces and exact errors of samplers on them."""

from __future__ import annotations

from constrained import exact_length, sampling_of
from enumeration import distance, enumerate_distribution
from tabular import (
    PROMPTS,
    TabularCausal,
    causal_target,
)

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.testing.even_reward import EvenEvaluator

EXACT, WRONG = 1e-12, 1e-3


CONTEXTS = len(PROMPTS)


COMBINED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)


SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guided": SamplingParams(guidance_scale=2.0),
    "combined": COMBINED,
}


COUPLINGS, INITS = registry.table("coupling"), registry.table("initialiser")


autoregressive = registry.get("sampler", "autoregressive")


jacobi = registry.get("sampler", "speculative_jacobi")


speculative = registry.get("sampler", "speculative")


def models(space: TokenSpace, sampling: SamplingParams):
    """A target and a draft model that differ, of ids that are all possible."""

    def make(seed):
        return TabularCausal(space.vocab_size, seed, low=0.0, spread=1.5)

    return make(0), make(5)


def error(
    sampler,
    space: TokenSpace,
    sampling: SamplingParams = SAMPLING_CASES["plain"],
    draft_space: TokenSpace | None = None,
) -> float:
    """The largest error of a probability, over three contexts of different lengths that are decoded
    in one batch."""
    model, small = models(space, sampling)

    def decode(rng, context):
        draft = (
            causal_target(small, draft_space or space, sampling, context)
            if sampler.drafted
            else None
        )
        return sampler(causal_target(model, space, sampling, context), rng, draft=draft).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    expected = [sampling_of(model, space, sampling, c) for c in range(CONTEXTS)]
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in expected), (
        "the distribution is too simple to test anything"
    )
    assert distance(expected[0], expected[1]) > WRONG, (
        "contexts must differ, or mixing up rows would go unseen"
    )
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


LONG = exact_length(12, 9)


def run(
    sampler,
    space: TokenSpace = LONG,
    sampling: SamplingParams = SAMPLING_CASES["guided"],
    rows: list[int] | None = None,
    **kwargs,
):
    rows = list(range(20)) if rows is None else rows
    model, small = models(space, sampling)
    context = [r % CONTEXTS for r in rows]
    draft = causal_target(small, space, sampling, context) if sampler.drafted else None
    target = causal_target(model, space, sampling, context)
    target.evaluator = EvenEvaluator()  # searches judge what they make
    return sampler(
        target,
        CounterRNG([7919 * r + 5 for r in rows]),
        draft=draft,
        **kwargs,
    )
