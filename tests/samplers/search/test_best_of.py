"""Laws of ``best_of``, by running its production code on every outcome of its draws."""

from __future__ import annotations

import pytest
from enumeration import distance
from searches_closed_form import best_of_law, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.sampling_params import SamplingParams

EXACT, WRONG = 1e-12, 1e-3
SPACE = space_of((2,), 3)
CONTEXTS = 2


def ties(tokens, prompt):
    """Reward with three values, so that outputs tie."""
    return float(tokens[0] == 1) + float(tokens[1] == 2)


def closed(n, reward=ties):
    """The closed form of every context."""
    model = TabularCausal(3, low=0.0)
    laws = [causal_distribution(model, SPACE, SamplingParams(), c) for c in range(CONTEXTS)]
    return [best_of_law(p, {x: reward(x, "") for x in p}, n) for p in laws]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_law_is_the_closed_form_where_outputs_tie(n):
    spec = {"name": "best_of", "n": n, "base": "autoregressive", "scorer": ties}
    found = search_law(spec, SPACE, CONTEXTS)
    assert max(map(distance, found, closed(n))) < EXACT
