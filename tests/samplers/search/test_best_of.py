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


BASES = {
    "speculative": {"name": "speculative", "num_speculative_tokens": 1},
    "gumbel_shared": {"name": "speculative_jacobi", "coupling": "gumbel_shared", "window": 2},
    "maximal": {"name": "speculative_jacobi", "coupling": "maximal", "window": 2},
}


@pytest.mark.parametrize("base", BASES)
def test_the_law_is_the_closed_form_with_drafts(base):
    space, model = space_of((2,), 2), TabularCausal(2, low=0.0)
    law = causal_distribution(model, space, SamplingParams(), 0)
    closed_form = best_of_law(law, {x: float(x[0] == x[1]) for x in law}, 2)
    spec = {"name": "best_of", "n": 2, "base": BASES[base]}
    draft = TabularCausal(2, 5, low=0.0) if base == "speculative" else None
    (found,) = search_law(
        {**spec, "scorer": lambda tokens, prompt: float(tokens[0] == tokens[1])},
        space,
        draft=draft,
    )
    assert distance(found, closed_form) < EXACT
    assert distance(found, law) > WRONG


def test_control_another_number_of_samples_has_another_law():
    found = search_law(
        {"name": "best_of", "n": 2, "base": "autoregressive", "scorer": ties}, SPACE, CONTEXTS
    )
    assert max(map(distance, found, closed(3))) > WRONG
