"""ATTS: coverage of its conformal test on simulated tasks, and its limits on closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from searches_closed_form import judged_target
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.search.atts import critical_score, likelihood, p_value, save_calibration

SPACE = space_of((6,), 3)
TASKS, ALPHA, CALIBRATION = 1000, 0.05, 199


def nothing(tokens, prompt):
    return 0.0


def decode(context=(0, 1, 2), **params):
    spec = {"name": "atts", "base": "autoregressive", "scorer": nothing, **params}
    draft = judged_target(SPACE, context, model=TabularCausal(3, seed=5, low=0.0))
    target = judged_target(SPACE, context)
    return resolve_sampler(spec)[0](target, CounterRNG(list(context)), draft=draft)


def vote(context=(0, 1, 2), seed=0, **params):
    spec = {"name": "majority_vote", "base": "autoregressive", "scorer": nothing, **params}
    target = judged_target(SPACE, context, model=TabularCausal(3, seed=seed, low=0.0))
    return resolve_sampler(spec)[0](target, CounterRNG(list(context)))


def simulated(seed, shift=0.0, heavy=False):
    """Scores of calibration [TASKS, CALIBRATION] and of one draft of each task [TASKS]."""
    rng = np.random.default_rng(seed)
    shape = (TASKS, CALIBRATION + 1)
    drawn = rng.standard_t(2, shape) if heavy else rng.normal(size=shape)
    return drawn[:, 1:] + shift, drawn[:, 0]


def coverage(calibration, scores):
    kept = [s > critical_score(c, ALPHA) for c, s in zip(calibration, scores, strict=True)]
    return float(np.mean(kept))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heavy", [False, True])
def test_coverage_over_simulated_tasks_is_as_stated(seed, heavy):
    assert abs(coverage(*simulated(seed, heavy=heavy)) - (1 - ALPHA)) <= 0.02


@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_control_a_calibration_of_other_drafts_misses_the_coverage(shift):
    assert abs(coverage(*simulated(0, shift)) - (1 - ALPHA)) > 0.02


def test_control_a_normal_threshold_without_calibration_misses_it_for_heavy_tails():
    _, scores = simulated(0, heavy=True)
    assert abs(float(np.mean(scores > -1.645)) - (1 - ALPHA)) > 0.02


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 19, 20])
def test_the_critical_score_is_where_the_p_value_crosses_alpha(alpha, count):
    rng = np.random.default_rng(0)
    calibration = rng.normal(size=count).round(1)  # with ties
    critical = critical_score(calibration, alpha)
    for score in [*calibration, *(calibration - 0.05), -9.0, 9.0]:
        assert (score <= critical) == (p_value(calibration, score) <= alpha + 1e-12)


def test_the_likelihood_is_that_of_the_model_in_one_pass():
    space = space_of((3,), 3)
    law = causal_distribution(TabularCausal(3, low=0.0), space, SamplingParams(), 1)
    outputs = list(law)
    target = judged_target(space, [1] * len(outputs))
    found, stats = likelihood(target, torch.tensor(outputs))
    assert found == pytest.approx([math.log(law[x]) / 3 for x in outputs])
    assert {s.nfe for s in stats} == {1}


def test_where_all_drafts_are_rejected_it_is_the_vote_of_the_target():
    out, full = decode(n=5, alpha=1.0, calibration=[0.0]), vote(n=5)
    assert out.tokens.equal(full.tokens)
    for stats, other in zip(out.stats, full.stats, strict=True):
        assert stats.nfe == other.nfe + 5  # a pass of the target judges each draft
        assert stats.draft_nfe == 5 * SPACE.length
    plain = resolve_sampler("autoregressive")[0]
    expected = plain(judged_target(SPACE, (0, 1, 2)), CounterRNG([0, 1, 2])).tokens
    assert decode(n=1, alpha=1.0, calibration=[0.0]).tokens.equal(expected)


def test_where_none_is_rejected_the_target_draws_nothing():
    out = decode(n=5, alpha=0.0, calibration=[0.0])
    assert [s.nfe for s in out.stats] == [5] * 3
    assert {c.label for found in out.candidates for c in found} == {"draft"}
    assert not out.tokens.equal(vote(n=5).tokens)


def test_the_target_redraws_what_the_threshold_rejects_with_unused_noise():
    out = decode(n=6, threshold=-1.2)
    full = vote(n=6)
    labels = set()
    for found, redrawn in zip(out.candidates, full.candidates, strict=True):
        for mine, other in zip(found, redrawn, strict=True):
            labels.add(mine.label)
            assert mine.tokens.equal(other.tokens) or mine.label == "draft"
    assert labels == {"draft", "target"}


def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch():
    more = {"n": 5, "threshold": -1.2}
    joint = decode(**more)
    assert joint.tokens.equal(decode((2, 1, 0), **more).tokens.flip(0))
    assert decode((1,), **more).tokens[0].equal(joint.tokens[1])


def test_an_item_without_budget_keeps_its_drafts():
    out = decode(n=5, alpha=1.0, calibration=[0.0], budget="5 passes")
    assert {c.label for found in out.candidates for c in found} == {"draft"}


def test_a_calibration_is_read_from_its_folder(tmp_path):
    save_calibration(tmp_path, np.array([-1.5, -1.0, -0.5]))
    sampler, _ = resolve_sampler(
        {"name": "atts", "base": "autoregressive", "calibration": str(tmp_path), "alpha": 0.5}
    )
    assert -1.01 < sampler.least_score() < -1.0


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({}, "sampler.calibration is None"),
        ({"calibration": []}, "finite score"),
        ({"calibration": [math.nan]}, "finite score"),
        ({"calibration": [0.0], "threshold": 0.0}, "expected one of them"),
        ({"threshold": 0.0, "base": "speculative"}, "without a draft model"),
        ({"threshold": 0.0, "base": "maskgit"}, "causal"),
        ({"threshold": 0.0, "alpha": 2}, "between 0 and 1"),
    ],
)
def test_bad_parameters_are_one_error(wrong, words):
    with pytest.raises(GenError, match=words):
        decode(**wrong)
