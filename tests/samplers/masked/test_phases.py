"""Records of a masked step: each is there from its phase on; reading it earlier names the phase."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest
import torch
from masked_steps import changed, masked_step
from tabular import TabularMasked, masked_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.masked.step import LEFT_OUT_LOGP, LOGPROBS, needs, needs_of

IDS, ROWS = 4, 2
SPACE = space_of((2, 3), IDS, masked=True)
MODEL = TabularMasked(IDS + 1, low=0.0)
PHASES = {
    "block progress": (
        "open",
        "is_first_step",
        "steps_in_block",
        "num_masked_at_start",
        "progress",
        "is_last_step",
        "quota",
    ),
    "predict": ("logprobs", "fresh", "left_out_logp"),
    "propose": ("proposed_tokens", "logp", "confidence"),
}


def bare_step():
    masked = torch.tensor([[True, False, True]])
    return masked_step(
        None,
        torch.arange(1),
        torch.zeros(1).long(),
        SPACE,
        resolve_sampler("maskgit")[0],
        canvas=masked.long() * IDS,
        prefilled=~masked,
        masked=masked,
    )


def decode(**params):
    sampler = resolve_sampler({"name": "masked_iterative", "steps": 3, **params})[0]
    target = masked_target(MODEL, SPACE, SamplingParams(), list(range(ROWS)))
    return sampler(target, CounterRNG(range(ROWS)), trace=True)


@pytest.mark.parametrize(
    ("field", "phase"), [(field, phase) for phase, names in PHASES.items() for field in names]
)
def test_reading_a_field_before_its_phase_names_the_phase(field, phase):
    with pytest.raises(GenError, match=f"is read before the phase '{phase}'"):
        getattr(bare_step(), field)


def test_a_score_is_there_after_its_own_phase_alone():
    step = masked_step(
        None,
        torch.arange(1),
        torch.zeros(1).long(),
        SPACE,
        None,
        canvas=torch.zeros(1, 3),
        prefilled=torch.zeros(1, 3) > 0,
        masked=torch.ones(1, 3) > 0,
        logp=torch.zeros(1, 3),
    )
    with pytest.raises(GenError, match=r"step.score is read before the phase 'score'"):
        _ = step.score
    assert changed(step, score=step.logp).score is step.logp


def test_records_are_frozen():
    with pytest.raises(FrozenInstanceError):
        bare_step().view.tokens = None
    with pytest.raises(AttributeError):
        bare_step().canvas = None


def too_early(kind: str):
    """A part that reads what a later phase computes, and the words of the error."""
    if kind == "order":
        return lambda step: step.score, "step.score is read before the phase 'score'"
    if kind == "proposer":
        return lambda step: step.logp, "step.logp is read before the phase 'propose'"
    if kind == "block_schedule":
        return (
            lambda step: (step.logprobs[..., 0] < 0, step.rows),
            "step.logprobs is read before the phase 'predict'",
        )
    return (
        lambda step, count: (step.left_out_logp > 0, count),
        "step.left_out_logp is read by a part that does not declare it",
    )


@pytest.mark.parametrize("kind", ["order", "proposer", "block_schedule", "remasker"])
def test_a_part_that_reads_too_early_is_told_so(kind, monkeypatch):
    part, words = too_early(kind)
    monkeypatch.setitem(registry._kinds[kind], "broken", part)
    with pytest.raises(GenError, match=re.escape(words)):
        decode(**{"blocks" if kind == "block_schedule" else kind: "broken"})


@pytest.mark.parametrize(
    ("kind", "need"), [("block_schedule", LOGPROBS), ("remasker", LEFT_OUT_LOGP)]
)
def test_a_need_that_is_declared_is_met(kind, need, monkeypatch):
    def schedule(step):
        return step.logprobs[..., 0] <= 0, torch.zeros_like(step.rows)

    def remasker(step, count):
        return step.left_out_logp > 0, count

    part = needs(need)(schedule if kind == "block_schedule" else remasker)
    assert needs_of(part) == {need}
    monkeypatch.setitem(registry._kinds[kind], "declared", part)
    out = decode(**{"blocks" if kind == "block_schedule" else kind: "declared"})
    assert not bool(SPACE.is_masked(out.tokens).any())
    plain = decode()
    assert torch.equal(out.tokens, plain.tokens), "neither of them decides anything"
    more = [
        a.tokens_computed > b.tokens_computed for a, b in zip(out.stats, plain.stats, strict=True)
    ]
    assert more == [need == LEFT_OUT_LOGP] * ROWS, "left-out canvases are counted"


def test_without_raw_logprobs_a_step_says_so():
    step = bare_step()
    step = masked_step(
        step.rng,
        step.rows,
        step.step_index,
        SPACE,
        None,
        canvas=step.canvas,
        prefilled=step.prefilled,
        masked=step.masked,
        logprobs=torch.zeros(1, 3, IDS),
    )
    with pytest.raises(GenError, match=r"step.raw_logprobs is read for a target that has none"):
        step.raw_logprobs()
