"""Drafts that the target cannot say, eos tokens among them: every verifier and every coupling gives
the target's distribution, computed on every outcome of its draws.

Behind such a draft the target has no distribution at all (NaN), which nothing may read.
"""

from __future__ import annotations

import itertools

import pytest
from disjoint import END, PAIRS, error, space_of
from tabular import causal_target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.verifiers.base import Block, Token

EXACT, WRONG = 1e-12, 1e-3
COLD = SamplingParams(temperature=0.7, top_k=3)
ENDS = {"end": True, "no_end": False}
# a verifier that asks for temperature 0 has no distribution to compare: test_verifier_limits.py
VERIFIERS = {
    n: rule
    for n, rule in registry.table("verifier").items()
    if not (rule.needs_greedy or rule.needs_weights)
}
RELAXED = [name for name, rule in VERIFIERS.items() if rule.relaxed]
EXACT_ONES = [name for name in VERIFIERS if name not in RELAXED]
POLICIES = [
    n
    for n, p in registry.table("length_policy").items()
    if not (p.needs_same_tokens or p.needs_weights)
]
COUPLINGS, INITS = registry.table("coupling"), registry.table("initialiser")
speculative = registry.get("sampler", "speculative")
relaxed = registry.get("sampler", "relaxed_acceptance")
jacobi = registry.get("sampler", "speculative_jacobi")


def cases(*axes) -> list:
    """Combinations of the axes; three of four are slow, so that every value is seen in time."""
    every = itertools.product(*(list(enumerate(axis)) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in case),
            id="-".join(str(value) for _, value in case),
            marks=[pytest.mark.slow] if sum(i for i, _ in case) % 4 else [],
        )
        for case in every
    ]


def chain(verifier: str, **params):
    """Sampler that drafts with a model, exact whatever the verifier."""
    if not VERIFIERS[verifier].relaxed:
        return speculative(verifier=verifier, **params)
    return relaxed(verifier=verifier, relaxation=0, drafter="model", **params)


@pytest.mark.parametrize(("verifier", "pair", "end"), cases(VERIFIERS, PAIRS, ENDS))
@pytest.mark.thinned(5)
def test_every_verifier_of_a_draft_model(verifier, pair, end):
    sampler = chain(verifier, num_speculative_tokens=2)
    assert error(sampler, PAIRS[pair], space_of(3, ENDS[end]), SamplingParams()) < EXACT


@pytest.mark.parametrize(("verifier", "policy", "pair"), cases(EXACT_ONES, POLICIES, PAIRS))
@pytest.mark.thinned(5)
def test_every_length_policy(verifier, policy, pair):
    sampler = chain(verifier, policy=policy, num_speculative_tokens=3, confidence_threshold=0.6)
    assert error(sampler, PAIRS[pair], space_of(3, True), COLD) < EXACT


@pytest.mark.parametrize(("coupling", "pair", "end"), cases(COUPLINGS, PAIRS, ENDS))
@pytest.mark.thinned(3)
def test_every_coupling_of_jacobi(coupling, pair, end):
    sampler = jacobi(coupling=coupling, window=3)
    assert error(sampler, PAIRS[pair], space_of(3, ENDS[end]), SamplingParams()) < EXACT


@pytest.mark.parametrize(("coupling", "init"), cases(COUPLINGS, INITS))
@pytest.mark.thinned(3)
def test_every_initialiser_of_jacobi(coupling, init):
    for pair in ("target_ends", "holes"):
        sampler = jacobi(coupling=coupling, init=init, window=3)
        assert error(sampler, PAIRS[pair], space_of(3, True), COLD) < EXACT


@pytest.mark.parametrize(
    ("verifier", "coupling"),
    cases(RELAXED, [name for name in COUPLINGS if name != "gumbel"]),
)
@pytest.mark.thinned(2)
def test_every_relaxed_verifier_of_every_coupling_without_relaxation(verifier, coupling):
    sampler = relaxed(verifier=verifier, relaxation=0, coupling=coupling, window=3)
    assert error(sampler, PAIRS["draft_ends"], space_of(3, True), SamplingParams()) < EXACT


@pytest.mark.parametrize("verifier", EXACT_ONES)
def test_an_eos_token_of_the_draft_alone_stands_in_no_output(verifier):
    """It stood in 1,972 of 2,000 outputs of the block verifier."""
    space, context = space_of(6, True), [0, 1, 2, 0] * 25
    target, draft = (
        causal_target(m, space, SamplingParams(), context) for m in PAIRS["draft_ends"].models()
    )
    out = chain(verifier, num_speculative_tokens=4)(target, CounterRNG(range(100)), draft=draft)
    assert not bool((out.tokens == END).any()) and len(out.tokens.unique(dim=0)) > 50


# --- controls


def test_control_a_block_verifier_that_reads_what_is_not_there(monkeypatch):
    """It accepts a draft that cannot stand, and the token behind that has no distribution."""
    monkeypatch.setattr(Block, "rest", lambda self, joint, p, q: (joint * p - q).clamp_min(0))
    with pytest.raises(GenError, match="gives no distribution"):
        error(chain("block"), PAIRS["apart"], space_of(3, True), SamplingParams())


def test_control_a_coupling_that_draws_from_the_distribution_in_place_of_the_residual(monkeypatch):
    monkeypatch.setattr(Token, "residual", lambda self, proposal, logp: logp)
    sampler = jacobi(coupling="fresh", window=3)
    assert error(sampler, PAIRS["holes"], space_of(3, True), SamplingParams()) > WRONG
