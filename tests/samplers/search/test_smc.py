"""Particle weights of ``smc``: unbiased for any values and any times of resampling, by enumeration
of production code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from searches_closed_form import Judged, estimates_of_z
from tabular import TabularCausal, TabularMasked, causal_distribution, masked_distribution, space_of

from gen.core.sampling_params import SamplingParams
from gen.samplers.search.resampling import (
    WeightedParticles,
    Weighting,
    in_place,
    normalised,
    systematic,
)
from gen.samplers.search.smc import SMC

EXACT, WRONG = 1e-12, 1e-3
PLAIN = SamplingParams()
SPACE, MASKED = space_of((3,), 2), space_of((2,), 2, masked=True)
LAM = 1.3


def reward(tokens, prompt=""):
    """Reward of an output, which depends on all of its tokens."""
    return math.sin(sum((k + 1.7) * (t + 0.4) for k, t in enumerate(tokens)))


def crude(tokens):
    """Value of a prefix that is nothing like the soft value."""
    return 0.8 * math.cos(sum(3 * t + 1 for t in tokens if t is not None))


VALUE = Judged(crude)


def expected(law):
    """p(x) exp(lam r(x)) of every output."""
    return {x: p * math.exp(LAM * reward(x)) for x, p in law.items()}


def error(found, law):
    """Largest error of E[Z^ 1{out = x}] over all outputs."""
    return max(abs(found.get(x, 0.0) - mass) for x, mass in expected(law).items())


def causal_law():
    return causal_distribution(TabularCausal(2, low=0.0), SPACE, PLAIN, 0)


@pytest.mark.parametrize("resample", ["every", "ess"])
@pytest.mark.parametrize("particles", [1, 2, 3])
def test_estimates_are_unbiased_and_weight_the_outputs_right(particles, resample):
    space = SPACE if particles < 3 else space_of((2,), 2)
    law = causal_distribution(TabularCausal(2, low=0.0), space, PLAIN, 0)
    sampler = SMC(particles=particles, lam=LAM, resample=resample, scorer=reward, value=VALUE)
    (found,) = estimates_of_z(sampler, space, reward)
    assert error(found, law) < EXACT


def test_estimates_are_unbiased_on_a_masked_base():
    base = {"name": "masked_iterative", "steps": 2, "order": "raster"}
    sampler = SMC(base=base, particles=2, lam=LAM, scorer=reward)
    law = masked_distribution(TabularMasked(MASKED.vocab_size, low=0.0), MASKED, PLAIN, 0, [0, 1])
    (found,) = estimates_of_z(sampler, MASKED, reward, masked=True)
    assert error(found, law) < EXACT


def test_twice_the_steps_of_a_block_halve_the_decisions_and_stay_unbiased():
    sampler = SMC(particles=2, lam=LAM, block=2, scorer=reward, value=VALUE)
    (found,) = estimates_of_z(sampler, SPACE, reward)
    assert error(found, causal_law()) < EXACT


class DroppedWeights(WeightedParticles):
    """Particles whose weights are forgotten where a resampling is skipped."""

    def decide(self, level):
        index = super().decide(level)
        self.log_weights[level.items[~level.is_last]] = 0.0
        return index


def adaptive_rule(kind):
    weighting = Weighting(LAM, adaptive=True)
    return lambda search, items: kind(search, items, 2, weighting)


def test_control_dropped_weights_are_biased():
    sampler = SMC(particles=2, lam=LAM, resample="ess", scorer=reward, value=VALUE)
    (right,) = estimates_of_z(sampler, SPACE, reward, rule=adaptive_rule(WeightedParticles))
    (wrong,) = estimates_of_z(sampler, SPACE, reward, rule=adaptive_rule(DroppedWeights))
    assert error(right, causal_law()) < EXACT
    assert error(wrong, causal_law()) > WRONG


class UnpaidPotentials(WeightedParticles):
    """Particles without a correction at the end."""

    def log_terminal(self, value, level):
        return np.zeros_like(value)


def test_control_weights_without_the_terminal_correction_are_biased():
    sampler = SMC(particles=2, lam=LAM, scorer=reward, value=VALUE)
    (wrong,) = estimates_of_z(
        sampler, SPACE, reward, rule=lambda s, n: UnpaidPotentials(s, n, 2, Weighting(LAM))
    )
    assert error(wrong, causal_law()) > WRONG


def test_systematic_resampling_keeps_expected_numbers_and_their_bounds():
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8):
        shares = rng.dirichlet(np.full(count, 0.7), size=200)
        shares[0] = 1 / count
        logp, vectors = systematic(shares)
        numbers = (vectors[..., None] == np.arange(count)).sum(2)  # [n, outcomes, P]
        p = np.exp(logp)
        assert abs(p.sum(1) - 1).max() < EXACT
        assert abs((p[..., None] * numbers).sum(1) - count * shares).max() < EXACT
        possible = numbers[p > EXACT]
        wanted = np.repeat(count * shares[:, None], count, axis=1)[p > EXACT]
        assert (abs(possible - wanted) < 1 + EXACT).all()


def test_equal_weights_leave_every_particle_where_it_is():
    for count in range(1, 12):
        logp, vectors = systematic(np.full((1, count), 1 / count))
        assert (vectors[np.exp(logp) > 0] == np.arange(count)).all()


def test_control_multinomial_resampling_of_equal_weights_moves_particles():
    drawn = np.random.default_rng(0).integers(0, 4, size=(50, 4))
    assert (np.sort(drawn) != np.arange(4)).any(1).mean() > 0.5


def test_a_survivor_keeps_its_slot_and_numbers_stay():
    rng = np.random.default_rng(1)
    index = rng.integers(0, 5, size=(300, 5))
    found = in_place(index)
    assert (np.sort(found) == np.sort(index)).all()
    for before, after in zip(index, found, strict=True):
        survivors = np.unique(before)
        assert (after[survivors] == survivors).all()


def test_weights_of_far_rewards_neither_overflow_nor_vanish():
    shares = normalised(np.array([[-1e5, 0.0, 1e5], [-3e5, -3e5, -3e5]]))
    assert (shares == [[0, 0, 1], [1 / 3] * 3]).all()
