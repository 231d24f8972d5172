"""Early answers on models in closed form."""

from __future__ import annotations

import pytest
from enumeration import distance
from searches_closed_form import judged_target, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams

EXACT, WRONG = 1e-12, 1e-3
SPACE, PAIR = space_of((6,), 3), space_of((2,), 3)


def reward(tokens, prompt):
    return float(tokens[-1] == 2)


def decode(context=(0, 1, 2), space=SPACE, **params):
    spec = {"name": "early_answer", "base": "autoregressive", "scorer": reward, **params}
    target = judged_target(space, context)
    return resolve_sampler(spec)[0](target, CounterRNG(list(context)))


def closed_law(more):
    """The first output if it is rewarded, else the best of it and ``more`` others."""
    p = causal_distribution(TabularCausal(3, low=0.0), PAIR, SamplingParams(), 0)
    hit = sum(q for x, q in p.items() if reward(x, ""))
    none = (1 - hit) ** more  # of the others is rewarded
    return {
        x: q + (1 - hit) * (1 - none) * q / hit if reward(x, "") else q * none for x, q in p.items()
    }


@pytest.mark.parametrize("more", [1, 2])
def test_the_law_is_its_closed_form(more):
    spec = {"name": "early_answer", "base": "autoregressive", "scorer": reward, "more": more}
    assert distance(search_law(spec, PAIR)[0], closed_law(more)) < EXACT


def test_control_the_law_without_further_samples_is_another():
    spec = {"name": "early_answer", "base": "autoregressive", "scorer": reward, "threshold": None}
    assert distance(search_law(spec, PAIR)[0], closed_law(2)) > WRONG


def test_without_conditions_one_sample_is_the_base_token_for_token():
    plain = resolve_sampler("autoregressive")[0]
    expected = plain(judged_target(SPACE, (0, 1, 2)), CounterRNG([0, 1, 2])).tokens
    assert decode(threshold=None).tokens.equal(expected)


def test_expensive_samples_are_drawn_where_the_cheap_one_fails_and_nowhere_else():
    out = decode([0, 1, 2] * 4, more=3)
    counts = set()
    for found, stats in zip(out.candidates, out.stats, strict=True):
        count = 1 if found[0].score == 1 else 4
        assert len(found) == count
        assert stats.nfe == count * SPACE.length
        counts.add(count)
    assert counts == {1, 4}


def test_samples_that_disagree_ask_for_more():
    def cost(agreement):
        out = decode(n=3, threshold=None, agreement=agreement, more=2, aggregation="majority")
        return [len(found) for found in out.candidates]

    assert cost(0.3) == [3, 3, 3]
    assert cost(1.0) == [5, 5, 5]


@pytest.mark.parametrize("then", [None, {"name": "best_of", "n": 3}, {"name": "svdd", "m": 2}])
def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch(then):
    if then is not None:
        # the reward reads the prompt, so that a search that judged another item would differ
        then = {**then, "base": "autoregressive", "scorer": by_prompt}
    more = {"then": then, "more": 2, "scorer": by_prompt, "threshold": 2.0}
    joint = decode(**more)
    assert joint.tokens.equal(decode((2, 1, 0), **more).tokens.flip(0))
    assert decode((2,), **more).tokens[0].equal(joint.tokens[2])


def by_prompt(tokens, prompt):
    return float(tokens[-1] == int(prompt)) + 0.5 * float(tokens[0] == int(prompt))


def test_an_item_without_budget_gets_no_expensive_samples():
    out = decode(n=1, threshold=2.0, budget="6 passes")
    assert [s.nfe for s in out.stats] == [6, 6, 6]
    assert min(s.nfe for s in decode(n=1, threshold=2.0).stats) > 6


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"n": 0}, "sampler.n"),
        ({"then": "maskgit"}, "of the same model"),
        ({"then": "speculative"}, "the same ones"),
        ({"then": "autoregresive"}, "Did you mean 'autoregressive'"),
        ({"threshold": "high"}, "sampler.threshold"),
        ({"agreement": 2}, "between 0 and 1"),
    ],
)
def test_bad_parameters_are_one_error(wrong, words):
    with pytest.raises(GenError, match=words):
        decode(**wrong)
