"""Laws of ``svdd`` at finite M, by enumeration of production code."""

from __future__ import annotations

import math
from functools import cache

import pytest
from enumeration import distance
from searches_closed_form import (
    Judged,
    search_law,
    selected_law,
    tilted,
    total_variation,
)
from tabular import (
    PROMPTS,
    TabularCausal,
    TabularMasked,
    causal_distribution,
    masked_distribution,
    space_of,
)

from gen.core.sampling_params import SamplingParams

EXACT, WRONG = 1e-12, 1e-3
PLAIN = SamplingParams()
SPACE, MASKED = space_of((2,), 2), space_of((2,), 2, masked=True)
MODEL, MASKED_MODEL = TabularCausal(2, low=0.0), TabularMasked(MASKED.vocab_size, low=0.0)
RASTER = {"name": "masked_iterative", "steps": 2, "order": "raster"}
ALPHA = 0.5


def reward(tokens, prompt=""):
    """Reward of an output, which depends on both of its tokens."""
    return 0.9 * tokens[0] - 0.4 * tokens[1] + 1.1 * tokens[0] * tokens[1]


def causal_law():
    return causal_distribution(MODEL, SPACE, PLAIN, 0)


def soft_value(tokens):
    """alpha log E[exp(r / alpha) | known tokens], of the causal model."""
    known = [t for t in tokens if t is not None]
    found = {x: p for x, p in causal_law().items() if list(x[: len(known)]) == known}
    mean = math.fsum(p * math.exp(reward(x) / ALPHA) for x, p in found.items())
    return ALPHA * math.log(mean / math.fsum(found.values()))


def causal_kernel(state):
    """Law of one more token."""
    logits = MODEL.after([*PROMPTS[0], *state])
    return {(*state, token): p for token, p in enumerate(PLAIN(logits).exp().tolist())}


def padded(state):
    """A state as a value sees it."""
    return (*state, *[None] * (SPACE.length - len(state)))


def of_state(value):
    """The score of a state: the reward of a finished one, else its value."""
    return lambda s: reward(s) if len(s) == SPACE.length else value(padded(s))


def crude(tokens):
    """Value of a prefix that is nothing like the soft value."""
    return math.cos(sum(3 * t + 1 for t in tokens if t is not None))


@pytest.mark.parametrize(
    ("m", "value", "alpha"),
    [
        (1, crude, ALPHA),
        (2, crude, ALPHA),
        (2, crude, 0.0),
        (2, soft_value, 0.0),
        pytest.param(3, soft_value, ALPHA, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_its_closed_enumeration_with_values_of_prefixes(m, value, alpha):
    spec = {"name": "svdd", "m": m, "alpha": alpha, "scorer": reward, "value": Judged(value)}
    (found,) = search_law(spec, SPACE)
    closed = selected_law(causal_kernel, of_state(value), (), SPACE.length, m, alpha)
    assert distance(found, closed) < EXACT


def masked_kernel(state):
    """Law of one more token, from left to right, with everything else masked."""
    mask = MASKED.mask_token_id
    n = len(state)
    canvas = [31, 40, *state, *[mask] * (MASKED.length - n)]
    logits = MASKED_MODEL.at(canvas, MASKED.length, n)
    p = PLAIN(logits, None, MASKED.legal[n]).exp().tolist()
    return {(*state, token): x for token, x in enumerate(p) if x > 0}


def posterior_mean(state):
    """Reward of a state whose masked positions hold the likeliest token."""
    while len(state) < MASKED.length:
        following = masked_kernel(state)
        state = max(following, key=following.__getitem__)
    return reward(state)


@pytest.mark.parametrize("m", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_law_is_its_closed_enumeration_with_the_estimate_of_a_masked_model(m):
    spec = {"name": "svdd", "base": RASTER, "m": m, "alpha": ALPHA, "scorer": reward}
    (found,) = search_law(spec, MASKED, masked=True)
    closed = selected_law(masked_kernel, posterior_mean, (), MASKED.length, m, ALPHA)
    assert distance(found, closed) < EXACT
    if m == 1:
        base = masked_distribution(MASKED_MODEL, MASKED, PLAIN, 0, [0, 1])
        assert distance(found, base) < EXACT


def test_control_another_number_of_candidates_has_another_law():
    spec = {"name": "svdd", "base": RASTER, "m": 2, "alpha": ALPHA, "scorer": reward}
    (found,) = search_law(spec, MASKED, masked=True)
    closed = selected_law(masked_kernel, posterior_mean, (), MASKED.length, 3, ALPHA)
    assert distance(found, closed) > WRONG


def test_the_law_of_the_exact_value_nears_the_tilted_one_with_more_candidates():
    target, _ = tilted(causal_law(), reward, 1 / ALPHA)
    away = []
    for m in (1, 2, 3, 4, 9):  # the closed enumeration is that of the test above
        found = selected_law(causal_kernel, cache(of_state(soft_value)), (), SPACE.length, m, ALPHA)
        away.append(total_variation(found, target))
    assert away == sorted(away, reverse=True)
    assert away[-1] < away[0] / 4


def test_the_candidate_of_highest_value_is_further_off_than_no_steering():
    """It maximises: its law does not depend on alpha, and no weak tilt is like it."""
    law = causal_law()
    target, _ = tilted(law, reward, 1 / 10)
    spec = {"name": "svdd_greedy", "m": 2, "scorer": reward, "value": Judged(soft_value)}
    (greedy,) = search_law(spec, SPACE)
    assert total_variation(greedy, target) > 2 * total_variation(law, target)
