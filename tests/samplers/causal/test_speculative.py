"""Speculative decoding with a draft model: what it promises about the distribution, computed
exactly on every outcome of its draws.

The controls break one part each and must miss by more than 1e-3.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from enumeration import ScriptedRNG, distance, enumerate_distribution
from tabular import EMPTY, PROMPTS, TabularCausal, causal_distribution, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.causal.drafters import model as drafting
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import StepContext
from gen.samplers.verifiers import base as verifiers
from gen.samplers.verifiers.base import Block, Token

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS = len(PROMPTS)
COMBINED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
SAMPLING_CASES = {"plain": SamplingParams(), "combined": COMBINED}
VERIFIERS = ["token", "block"]
# the batch decides about the others, whose drafts do not change the tokens: test_length_policies.py
POLICIES = [
    n
    for n, p in registry.table("length_policy").items()
    if not (p.needs_same_tokens or p.needs_weights)
]
speculative = registry.get("sampler", "speculative")
autoregressive = registry.get("sampler", "autoregressive")


def models(sampling: SamplingParams, ids: int):
    """A target and a draft model that differ."""
    target, draft = (
        TabularCausal.with_params(sampling, ids),
        TabularCausal.with_params(sampling, ids),
    )
    draft.seed = 5
    return target, draft


def error(sampler, sampling: SamplingParams, space: TokenSpace) -> float:
    """The largest error of a probability, over three contexts that are decoded in one ragged
    batch."""
    model, small = models(sampling, space.vocab_size)

    def both(context):
        return (causal_target(m, space, sampling, context) for m in (model, small))

    def decode(rng, context):
        target, draft = both(context)
        return sampler(target, rng, draft=draft).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    expected = [causal_distribution(model, space, sampling, c) for c in range(CONTEXTS)]
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in expected), (
        "the distribution is too simple to test anything"
    )
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("length", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.thinned(7)
def test_distribution_for_every_policy_and_length(verifier, policy, length, sampling):
    sampler = speculative(verifier=verifier, policy=policy, num_speculative_tokens=length)
    assert error(sampler, sampling, space_of((4,), 3)) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_distribution_over_many_rounds(verifier):
    """Six places of two ids: caches are caught up with after every kind of outcome."""
    for policy in POLICIES:
        sampler = speculative(
            verifier=verifier, policy=policy, num_speculative_tokens=2, confidence_threshold=0.6
        )
        assert error(sampler, SamplingParams(), space_of((6,), 2)) < EXACT


@pytest.mark.parametrize(
    "draft",
    [
        {"draft_temperature": 0.5},
        {"draft_temperature": 0.0},
        {"draft_guidance": 1.0},
        {"draft_guidance": 3.0, "draft_temperature": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.thinned(4)
def test_distribution_when_drafts_have_a_distribution_of_their_own(verifier, draft):
    sampling = SamplingParams(temperature=0.7, guidance_scale=2.0)
    for policy in POLICIES:
        sampler = speculative(verifier=verifier, policy=policy, num_speculative_tokens=2, **draft)
        assert error(sampler, sampling, space_of((3,), 3)) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_distribution_where_legal_ids_depend_on_the_place(verifier):
    legal = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    sampler = speculative(verifier=verifier, num_speculative_tokens=2)
    assert error(sampler, SamplingParams(), TokenSpace((3,), 4, legal)) < EXACT


# --- controls: each breaks one part of production code


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_control_drafts_from_another_distribution_than_the_stored_one(monkeypatch, verifier):
    """Drawn at temperature 0.5, claimed to be drawn at 1."""

    def draw(self, step, column, sampling, active):
        sharper = (2 * sampling).log_softmax(-1)[:, None]
        return step.categorical(sharper, "draft", active[:, None], column)[:, 0]

    monkeypatch.setattr(drafting.ModelDrafter, "draw", draw)
    assert (
        error(
            speculative(verifier=verifier, num_speculative_tokens=2),
            SamplingParams(),
            space_of((3,), 3),
        )
        > WRONG
    )


def test_control_residual_replaced_by_the_distribution(monkeypatch):
    monkeypatch.setattr(Token, "residual", lambda self, proposal, logp: logp)
    assert error(speculative(num_speculative_tokens=2), SamplingParams(), space_of((3,), 3)) > WRONG


def test_control_block_with_the_residual_of_token(monkeypatch):
    def decide(self, step, drafts, logp, _true=Block.decide):
        accepted, _ = _true(self, step, drafts, logp)
        at = accepted.clamp_max(drafts.tokens.shape[1] - 1)
        return accepted, lambda: Token().residual_at(drafts, logp, at)

    monkeypatch.setattr(Block, "decide", decide)
    assert (
        error(
            speculative(verifier="block", num_speculative_tokens=2),
            SamplingParams(),
            space_of((4,), 3),
        )
        > WRONG
    )


def test_control_doubtful_drafts_are_dropped(monkeypatch):
    """A draft that the policy stops at is not submitted: its value decided about itself."""

    def propose(self, step, tokens, _true=drafting.ModelDrafter.propose):
        draft = _true(self, step, tokens)
        drafts, drafted = draft.tokens, draft.exists
        for i in range(drafted.shape[1]):
            drafted[:, i] &= draft.logq[:, i].gather(1, drafts[:, i, None])[:, 0].exp() >= 0.4
        return draft

    monkeypatch.setattr(drafting.ModelDrafter, "propose", propose)
    sampler = speculative(policy="confidence", num_speculative_tokens=2)
    assert error(sampler, SamplingParams(), space_of((3,), 3)) > WRONG


def test_control_a_draft_cache_that_lacks_the_last_draft(monkeypatch):
    """It changes what is drafted but not the distribution of what is committed: drafts still come
    from the distribution that is stored."""

    def plain():
        return run_tokens(speculative(num_speculative_tokens=2), SamplingParams())

    before = plain()

    def observe(self, step, accepted, drafted, _true=drafting.ModelDrafter.observe):
        _true(self, step, accepted, drafted)
        self.known = step.starts + accepted

    monkeypatch.setattr(drafting.ModelDrafter, "observe", observe)
    assert not torch.equal(before, plain())
    assert error(speculative(num_speculative_tokens=2), SamplingParams(), space_of((4,), 3)) < EXACT


# --- block against token


def accepted_on_average(verifier: str, policy: str, length: int) -> list[float]:
    """Drafts accepted in the first round, per context."""
    space, sampling = space_of((length + 1,), 3), SamplingParams()
    model, small = models(sampling, 3)

    def decode(rng, context):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        sampler = speculative(verifier=verifier, policy=policy, num_speculative_tokens=length)
        out = sampler(target, rng, draft=draft, trace=True)
        return torch.tensor([[len(trace[0].accepted)] for trace in out.traces])

    return [
        math.fsum(k * mass for (k,), mass in sampling.items())
        for sampling in enumerate_distribution(decode, CONTEXTS)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(3)
def test_block_accepts_at_least_as_many_drafts(policy):
    for length in (1, 2, 3):
        token, block = (accepted_on_average(v, policy, length) for v in VERIFIERS)
        assert all(b >= t - 1e-12 for t, b in zip(token, block, strict=True))
        if length == 1:
            assert token == pytest.approx(block, abs=1e-12)
        elif policy == "constant":
            assert max(b - t for t, b in zip(token, block, strict=True)) > WRONG


def test_chains_of_one_draft_are_judged_alike_whatever_distribution_it_came_from():
    """The same coins and tokens from both verifiers, for rows, uniform distributions and point
    masses."""
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(300, 1, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    n = torch.arange(300)
    drafted = torch.ones(300, 1, dtype=torch.bool)
    step = StepContext(
        CounterRNG(range(300)), n, n * 0, n * 0, torch.zeros(300, 1, dtype=torch.long), drafted
    )
    uniform = (q * 0).log_softmax(-1)
    for drawn_from, logq in ((q, q), (uniform, uniform), (uniform, None)):
        tokens = step.categorical(drawn_from, "draft", drafted)
        drafts = Draft(tokens, drafted, logq)
        one, other = (v.verify(step, drafts, p) for v in (Token(), Block()))
        assert torch.equal(one.num_accepted, other.num_accepted)
        assert torch.equal(one.tokens, other.tokens) and 0 < int(one.num_accepted.sum()) < 300


# --- the same tokens, and what they cost


def run(sampler, sampling: SamplingParams, length: int = 12, rows: int = 24, same: bool = False):
    space = space_of((length,), 5)
    model, small = models(sampling, 5)
    context = [i % CONTEXTS for i in range(rows)]
    target, draft = (
        causal_target(m, space, sampling, context) for m in (model, model if same else small)
    )
    return sampler(target, CounterRNG([7919 * i + 5 for i in range(rows)]), draft=draft)


def run_tokens(sampler, sampling):
    return run(sampler, sampling).tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.thinned(3)
def test_at_temperature_zero_the_tokens_are_the_argmax_tokens(verifier, policy):
    sampling = SamplingParams(temperature=0.0)
    expected = run(autoregressive(), sampling).tokens
    for params in ({}, {"num_speculative_tokens": 2}, {"draft_temperature": 1.0}):
        assert torch.equal(
            run(speculative(verifier=verifier, policy=policy, **params), sampling).tokens, expected
        )


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_model_that_is_the_target_is_always_right(verifier):
    """So every round commits all drafts and one token more, and the draft is called once per
    draft."""
    sampling = SamplingParams(temperature=0.8, guidance_scale=1.5)
    for stats in run(
        speculative(verifier=verifier, num_speculative_tokens=3), sampling, same=True
    ).stats:
        assert (stats.nfe, stats.draft_nfe, stats.acceptance_histogram) == (3, 9, [0, 0, 0, 3])
    growing = speculative(verifier=verifier, policy="heuristic", num_speculative_tokens=1)
    for stats in run(
        growing, sampling, same=True
    ).stats:  # 1, 3, then 4 and no more, then nothing for the last place
        assert (stats.nfe, stats.draft_nfe, stats.acceptance_histogram) == (4, 8, [1, 1, 0, 1, 1])


def test_the_heuristic_policy_is_held_between_one_and_four_times_its_start():
    policy = registry.get("length_policy", "heuristic")(2, 2, 0.4)
    for _ in range(5):
        policy.observe(np.array([3, 3]), np.array([3, 1]))
    assert policy.lengths.tolist() == [8, 1]


def test_the_confidence_policy_stops_after_a_doubtful_draft():
    sampling = SamplingParams()
    out = {
        t: run(speculative(policy="confidence", confidence_threshold=t), sampling)
        for t in (0.0, 0.4, 1.0)
    }
    assert torch.equal(out[0.0].tokens, run(speculative(), sampling).tokens)  # never doubtful
    calls = {t: sum(s.draft_nfe for s in o.stats) for t, o in out.items()}
    assert calls[1.0] < calls[0.4] < calls[0.0]
    assert all(s.draft_nfe <= s.nfe for s in out[1.0].stats)  # one draft a round


# --- drafts of an unguided model, and mistakes


class Counting(TabularCausal):
    """Notes how many rows its calls had."""

    def forward(self, tokens, positions, cache):
        self.calls.append(len(tokens))
        return super().forward(tokens, positions, cache)


def test_unguided_drafts_cost_one_half():
    sampling, space = SamplingParams(guidance_scale=2.0), space_of((4,), 3)
    for guidance, rows in ((None, 4), (1.0, 2)):
        small = Counting.with_params(sampling, 3)
        small.calls = []
        target, draft = (
            causal_target(TabularCausal.with_params(sampling, 3), space, sampling, [0, 1]),
            causal_target(small, space, sampling, [0, 1]),
        )
        speculative(draft_guidance=guidance)(target, CounterRNG([1, 2]), draft=draft)
        assert max(small.calls) == rows


def test_a_target_under_another_distribution_keeps_its_condition():
    sampling, space = SamplingParams(guidance_scale=2.0), space_of((3,), 3)
    model = TabularCausal.with_params(sampling, 3)
    target = causal_target(model, space, sampling, [1, 0])
    nothing = torch.zeros(2, 1, dtype=torch.long)
    for other in (SamplingParams(), SamplingParams(temperature=0.5, guidance_scale=3.0), sampling):
        found = target.with_params(other).predict(nothing, nothing).logprobs[:, 0]
        expected = [
            other(
                model.after(list(PROMPTS[c])), model.after(list(EMPTY[c])) if other.guided else None
            )
            for c in (1, 0)
        ]
        assert torch.equal(found, torch.stack(expected))
    with pytest.raises(ValueError, match="unconditional"):
        target.with_params(SamplingParams()).with_params(sampling)


def test_mistakes_are_named_in_one_line():
    sampling, space = SamplingParams(), space_of((4,), 3)

    def make(space, ids):
        return causal_target(TabularCausal(ids), space, sampling, [0])

    legal = torch.ones(4, 3, dtype=torch.bool)
    legal[2, 1] = False
    for sampler, draft, said in (
        (speculative(), None, "drafts with a second model and got none"),
        (
            speculative(),
            make(space_of((4,), 5), 5),
            "the draft model has 5 ids; expected the target's 3 ids",
        ),
        (speculative(), make(TokenSpace((4,), 3, legal), 3), "legal ids are not the target's"),
        (speculative(), make(space_of((5,), 3), 3), "positions or legal ids are not the target's"),
        (
            speculative(draft_guidance=2.0),
            make(space, 3),
            "sampler.draft_guidance is 2.0; expected None or 1",
        ),
    ):
        with pytest.raises(GenError) as caught:
            sampler(make(space, 3), CounterRNG([1]), draft=draft)
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_harness_sees_a_coin_that_is_thrown_twice(monkeypatch):
    """Both verifiers ask for each coin once; one that asked again would be told."""

    def decide(self, step, drafts, logp, _true=verifiers.Token.decide):
        _true(self, step, drafts, logp)
        return _true(self, step, drafts, logp)

    monkeypatch.setattr(verifiers.Token, "decide", decide)
    sampling, space = SamplingParams(), space_of((3,), 3)
    target, draft = (causal_target(m, space, sampling, [0]) for m in models(sampling, 3))
    with pytest.raises(AssertionError, match="share their noise"):
        speculative()(target, ScriptedRNG([(0, ())]), draft=draft)
