"""Potentials of ``fk`` have one target, by enumeration of production code."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from searches_closed_form import Judged, estimates_of_z
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.sampling_params import SamplingParams
from gen.samplers.search.fk import FK
from gen.samplers.search.resampling import POTENTIALS, WeightedParticles, Weighting
from gen.samplers.search.steering import Level

EXACT, WRONG = 1e-12, 1e-3
SPACE, LAM = space_of((2,), 2), 1.3
LONG = space_of((3,), 2)


def reward(tokens, prompt=""):
    """Reward of an output, which depends on all of its tokens."""
    return math.sin(sum((k + 1.7) * (t + 0.4) for k, t in enumerate(tokens)))


VALUE = Judged(lambda tokens: 0.8 * math.cos(sum(3 * t + 1 for t in tokens if t is not None)))


def error(found, space):
    """Largest error of E[Z^ 1{out = x}] against p(x) exp(lam r(x))."""
    law = causal_distribution(TabularCausal(2, low=0.0), space, SamplingParams(), 0)
    return max(abs(found.get(x, 0.0) - p * math.exp(LAM * reward(x))) for x, p in law.items())


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("resampling", ["multinomial", "systematic"])
@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.thinned(9)
def test_all_potentials_have_the_same_target(potential, resampling, adaptive):
    sampler = FK(
        particles=2,
        lam=LAM,
        potential=potential,
        resampling=resampling,
        adaptive=adaptive,
        select="draw",
        scorer=reward,
        value=VALUE,
    )
    (found,) = estimates_of_z(sampler, LONG, reward)
    assert error(found, LONG) < EXACT


class AccumulatedReward(WeightedParticles):
    """Particles whose terminal weight has the highest, or summed, reward of the path in place of
    the output's."""

    def log_potential(self, level):
        value = self.weighting.lam * level.scores
        self.reached = self.potential(value, self.memory[level.items])[0]
        return super().log_potential(level)

    def log_terminal(self, value, level):
        return super().log_terminal(self.reached, level)


@pytest.mark.parametrize("potential", ["max", "add"])
def test_control_an_accumulated_terminal_reward_has_another_target(potential):
    sampler = FK(particles=2, lam=LAM, select="draw", scorer=reward, value=VALUE)
    weighting = Weighting(LAM, potential)
    (found,) = estimates_of_z(
        sampler, SPACE, reward, rule=lambda s, n: AccumulatedReward(s, n, 2, weighting)
    )
    assert error(found, SPACE) > WRONG


def products(kind, potential, seed=0, paths=64, length=6):
    """Logarithm of the product of all weights of paths of different lengths, and their lam r."""
    rng = np.random.default_rng(seed)
    rule = kind(None, paths, 1, Weighting(LAM, potential))
    ends, items = rng.integers(1, length, paths), np.arange(paths)
    values = rng.normal(size=(paths, length))
    total = np.zeros(paths)
    for number in range(length):
        done = (number >= ends)[:, None]
        scores = values[items, np.minimum(number, ends)][:, None]
        level = Level(number, items, scores, done)
        total += rule.log_potential(level)[:, 0]
        rule.paid[:, 0] = total
        rule.ended |= done
    return total, LAM * values[items, ends]


@pytest.mark.parametrize("potential", POTENTIALS)
def test_weights_along_every_path_multiply_to_the_tilt(potential):
    total, tilt = products(WeightedParticles, potential)
    assert abs(total - tilt).max() < EXACT


@pytest.mark.parametrize("potential", ["max", "add"])
def test_control_accumulated_rewards_do_not_multiply_to_the_tilt(potential):
    total, tilt = products(AccumulatedReward, potential)
    assert abs(total - tilt).max() > WRONG


def test_best_returns_the_particle_of_highest_reward():
    scores = np.array([[0.1, 0.7, 0.7], [0.3, -1.0, 0.2]])
    rule = WeightedParticles(SimpleNamespace(), 2, 3, Weighting(LAM, select="best"))
    assert rule.finish(np.arange(2), scores).tolist() == [1, 0]
