"""Distributions of the samplers of next-scale models, computed exactly: their production code runs
on every outcome of its draws, for scales of 1 and 4 positions and three codes.

The reference distributions come straight from the definitions (``tabular_scales.Chain``). Errors of
correct samplers are around 1e-16; the controls break one part each.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from enumeration import distance, enumerate_distribution
from tabular_scales import (
    TWO_SCALES,
    Chain,
    TabularRefinedScales,
    TabularScales,
    scales_target,
)

from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.models.targets.scales import ScalesTarget
from gen.samplers.scales import loop, scale_draft
from gen.samplers.verifiers.base import Token

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS, CODES = 2, 3
CASES = {
    "plain": SamplingParams(),
    "guidance": SamplingParams(guidance_scale=2.5),
    "filters": SamplingParams(temperature=0.7, top_k=2, guidance_scale=0.5),
}
next_scale = registry.get("sampler", "next_scale")
next_scale_masked = registry.get("sampler", "next_scale_masked")
draft_scale = registry.get("sampler", "scale_draft")
Distribution = dict[tuple[int, ...], float]


def model_of(form: type[TabularScales], sampling: SamplingParams, seed: int = 0) -> TabularScales:
    low, spread = (0.0, 1.5) if sampling.guided else (0.15, 4.0)
    return form(CODES, seed, low, spread, sides=TWO_SCALES)


def found(sampler, model: TabularScales, sampling: SamplingParams, draft=None, canvas=None):
    """The distribution of production code in every context."""

    def decode(rng, context):
        target = scales_target(model, sampling, context)
        more = {} if draft is None else {"draft": scales_target(draft, sampling, context)}
        if canvas is not None:
            more["canvas"] = canvas.expand(len(context), -1)
        return sampler(target, rng, **more).tokens

    return enumerate_distribution(decode, CONTEXTS)


def product(chain: Chain, last: Chain | None = None, guided: bool = True) -> Distribution:
    """The product of the scales, the last one of another model if that is given."""
    out: Distribution = {}
    for first, p in enumerate(chain.filled([], 0, guided)[0].tolist()):
        rest = (last or chain).filled([first], 1, guided).tolist()
        for ids in itertools.product(range(CODES), repeat=4):
            mass = p
            for at, token in enumerate(ids):
                mass *= rest[at][token]
            if mass > 0:
                out[first, *ids] = mass
    return out


def refining_chain(chain: Chain, order: list[int]) -> Distribution:
    """Scale 0 of the filling pass, then one position per refining pass in an order."""
    out: Distribution = {}

    def extend(first: int, own: tuple, mass: float, left: list[int]) -> None:
        if not left:
            out[first, *own] = mass
            return
        at, *rest = left
        for token, p in enumerate(chain.refined([first], own, 1)[at].tolist()):
            if p > 0:
                extend(first, (*own[:at], token, *own[at + 1 :]), mass * p, rest)

    for first, p in enumerate(chain.filled([], 0)[0].tolist()):
        if p > 0:
            extend(first, (None,) * 4, p, order)
    return out


def worst(found: list[Distribution], wanted: list[Distribution]) -> float:
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in wanted), "it is too simple"
    assert distance(wanted[0], wanted[1]) > WRONG, "contexts must differ"
    return max(distance(a, b) for a, b in zip(found, wanted, strict=True))


def chains(model: TabularScales, sampling: SamplingParams) -> list[Chain]:
    return [Chain(model, sampling, context) for context in range(CONTEXTS)]


@pytest.mark.parametrize("form", [TabularScales, TabularRefinedScales])
@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
def test_next_scale_samples_the_product_of_the_scales(form, sampling):
    model = model_of(form, sampling)
    wanted = [product(chain) for chain in chains(model, sampling)]
    assert worst(found(next_scale(), model, sampling), wanted) < EXACT


def test_control_guidance_of_the_first_scale_is_found(monkeypatch):
    sampling = CASES["guidance"]
    model = model_of(TabularScales, sampling)
    wanted = [product(chain) for chain in chains(model, sampling)]
    monkeypatch.setattr(ScalesTarget, "sampling_at", lambda self, scale: self.sampling)
    assert worst(found(next_scale(), model, sampling), wanted) > WRONG


def test_control_a_wrong_sum_is_found(monkeypatch):
    sampling = CASES["plain"]
    model = model_of(TabularScales, sampling)
    wanted = [product(chain) for chain in chains(model, sampling)]
    commit = ScalesTarget.commit
    monkeypatch.setattr(ScalesTarget, "commit", lambda self, ids: commit(self, (ids + 1) % CODES))
    assert worst(found(next_scale(), model, sampling), wanted) > WRONG


def test_the_first_scale_does_not_depend_on_guidance():
    model = model_of(TabularScales, CASES["guidance"])

    def first(sampling) -> Distribution:
        out: Distribution = {}
        for ids, mass in found(next_scale(), model, sampling)[0].items():
            out[ids[:1]] = out.get(ids[:1], 0.0) + mass
        return out

    guided, plain = first(CASES["guidance"]), first(CASES["plain"])
    assert distance(guided, plain) < EXACT
    whole = [found(next_scale(), model, s)[0] for s in (CASES["guidance"], CASES["plain"])]
    assert distance(*whole) > WRONG  # control: the other scale does depend on it


def test_a_guidance_of_one_is_the_conditional_distribution():
    sampling = SamplingParams(guidance_scale=1.0)
    model = model_of(TabularScales, CASES["guidance"])
    guided = [Chain(model, CASES["guidance"], context) for context in range(CONTEXTS)]
    conditional = [product(chain, guided=False) for chain in guided]
    assert worst(found(next_scale(), model, sampling), conditional) < EXACT
    assert worst(found(next_scale(), model, CASES["guidance"]), conditional) > WRONG


@pytest.mark.parametrize("schedule", [[[1], [4]], "fill"])
def test_a_schedule_of_one_pass_per_scale_is_the_product(schedule):
    sampling = CASES["guidance"]
    model = model_of(TabularRefinedScales, sampling)
    wanted = [product(chain) for chain in chains(model, sampling)]
    sampler = next_scale_masked(schedule=schedule)
    assert worst(found(sampler, model, sampling), wanted) < EXACT
    refined = next_scale_masked(schedule=[[1], [1, 3]], order="halton")
    assert worst(found(refined, model, sampling), wanted) > WRONG  # control


def halton_two_passes(chain: Chain, kept: int) -> Distribution:
    """The first of the Halton order from the filling pass, the others from one refining pass."""
    out: Distribution = {}
    for first, p in enumerate(chain.filled([], 0)[0].tolist()):
        for token, q in enumerate(chain.filled([first], 1)[kept].tolist()):
            if p * q == 0:
                continue
            own = [token if at == kept else None for at in range(4)]
            rest = chain.refined([first], own, 1).tolist()
            for others in itertools.product(range(CODES), repeat=3):
                ids = [*others[:kept], token, *others[kept:]]
                mass = p * q
                for at, value in enumerate(ids):
                    mass *= 1.0 if at == kept else rest[at][value]
                out[first, *ids] = mass
    return out


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
def test_two_passes_in_a_fixed_order_have_the_distribution_of_the_schedule(sampling):
    model = model_of(TabularRefinedScales, sampling)
    kept = int((loop.order_of("halton", (2, 2), torch.device("cpu")) == 0).nonzero())
    wanted = [halton_two_passes(chain, kept) for chain in chains(model, sampling)]
    sampler = next_scale_masked(schedule=[[1], [1, 3]], order="halton")
    assert worst(found(sampler, model, sampling), wanted) < EXACT
    other = [halton_two_passes(chain, (kept + 1) % 4) for chain in chains(model, sampling)]
    assert worst(found(sampler, model, sampling), other) > WRONG  # control


@pytest.mark.parametrize("judged", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["raster", "halton"])
@pytest.mark.thinned(3)
def test_scale_draft_samples_the_refining_chain(order, judged):
    sampling = CASES["filters"]
    model = model_of(TabularRefinedScales, sampling)
    positions = loop.order_of(order, (2, 2), torch.device("cpu")).argsort().tolist()
    wanted = [refining_chain(chain, positions) for chain in chains(model, sampling)]
    sampler = draft_scale(order=order, num_speculative_tokens=judged)
    assert worst(found(sampler, model, sampling), wanted) < EXACT


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
def test_scale_draft_is_exact_for_every_distribution(sampling):
    model = model_of(TabularRefinedScales, sampling)
    wanted = [refining_chain(chain, [0, 1, 2, 3]) for chain in chains(model, sampling)]
    sampler = draft_scale(order="raster", num_speculative_tokens=3)
    assert worst(found(sampler, model, sampling), wanted) < EXACT


def test_drafts_do_not_reach_a_model_whose_masked_tokens_leak(monkeypatch):
    """The published form reads tokens under the mask; those of the chain are no drafts."""
    sampling = CASES["plain"]
    model = model_of(TabularRefinedScales, sampling)
    model.leak = True
    wanted = [refining_chain(chain, [0, 1, 2, 3]) for chain in chains(model, sampling)]
    sampler = draft_scale(order="raster", num_speculative_tokens=3)
    assert worst(found(sampler, model, sampling), wanted) < EXACT
    refine = ScalesTarget.refine

    def leaking(self, ids, hidden, guidance=1.0, rows=None):
        other = torch.where(hidden, (ids + 1) % CODES, ids)
        return refine(self, other, hidden, guidance, rows)

    monkeypatch.setattr(ScalesTarget, "refine", leaking)
    assert worst(found(sampler, model, sampling), wanted) > WRONG  # control: other tokens there


def test_control_drafts_judged_by_another_distribution_are_found(monkeypatch):
    """q uniform over the allowed tokens in place of the filling pass."""
    sampling = CASES["guidance"]
    model = model_of(TabularRefinedScales, sampling)
    wanted = [refining_chain(chain, [0, 1, 2, 3]) for chain in chains(model, sampling)]
    sampler = draft_scale(order="raster", num_speculative_tokens=2)

    class Uniform(scale_draft.DraftedScale):
        def _draft(self):
            super()._draft()
            self.logq = torch.full_like(self.logq, -1.0).log_softmax(-1)

    monkeypatch.setattr(scale_draft, "DraftedScale", Uniform)
    assert worst(found(sampler, model, sampling), wanted) > WRONG


def test_control_drafts_without_a_verifier_are_found(monkeypatch):
    sampling = CASES["guidance"]
    model = model_of(TabularRefinedScales, sampling)
    wanted = [refining_chain(chain, [0, 1, 2, 3]) for chain in chains(model, sampling)]
    monkeypatch.setattr(Token, "chance", lambda self, q, logp: torch.ones(q.tokens.shape))
    assert worst(found(draft_scale(order="raster"), model, sampling), wanted) > WRONG


def test_a_small_model_for_the_last_scales_has_the_distribution_of_the_handover():
    sampling = CASES["guidance"]
    model, small = model_of(TabularScales, sampling), model_of(TabularScales, sampling, seed=7)
    both = zip(chains(model, sampling), chains(small, sampling), strict=True)
    wanted = [product(big, last) for big, last in both]
    got = found(next_scale(early=1), model, sampling, small)
    assert worst(got, wanted) < EXACT
    alone = [product(chain) for chain in chains(model, sampling)]
    assert worst(got, alone) > WRONG  # control
    assert worst(found(next_scale(early=2), model, sampling, small), alone) < EXACT


def test_known_tokens_stay_and_the_others_are_drawn_given_them():
    """The last scale with two known positions: the refining pass sees them."""
    sampling = CASES["plain"]
    model = model_of(TabularRefinedScales, sampling)
    canvas = torch.tensor([[1, 0, CODES, 2, CODES]])
    got = found(next_scale_masked(schedule="fill"), model, sampling, canvas=canvas)

    def given(chain: Chain, known: bool) -> Distribution:
        own = [0, None, 2, None] if known else [None] * 4
        p = chain.refined([1], own, 1) if known else chain.filled([1], 1)
        return {
            (1, 0, a, 2, b): float(p[1, a] * p[3, b])
            for a, b in itertools.product(range(CODES), repeat=2)
        }

    assert worst(got, [given(chain, True) for chain in chains(model, sampling)]) < EXACT
    unseen = [given(chain, False) for chain in chains(model, sampling)]
    assert worst(got, unseen) > WRONG  # control
    filled = found(next_scale(), model, sampling, canvas=canvas)
    assert worst(filled, unseen) < EXACT  # the filling pass sees no token of its own scale
