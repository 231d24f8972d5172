"""Aggregations: majority, weighted and tournament, on ballots and on enumerated models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from enumeration import distance
from searches_closed_form import judged_target, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.search.aggregations.base import Ballot, read_aggregation

EXACT, WRONG = 1e-12, 1e-3
SPACE = space_of((2,), 3)
NAMES = ["best", "majority", "weighted", "tournament"]


def reward(tokens, prompt):
    """Reward with ties."""
    return float(tokens[0] == 1) + 0.5 * float(tokens[1] == 2)


def ballot(scores, answers, weights=None):
    scores = np.asarray(scores, dtype=np.float64)
    return Ballot(scores, answers, np.ones(len(scores)) if weights is None else np.array(weights))


def closed_vote(kind, n):
    """The law of a vote over n independent outputs, by summing over all of them."""
    p = causal_distribution(TabularCausal(3, low=0.0), SPACE, SamplingParams(), 0)
    law = {}
    for drawn in itertools.product(p.items(), repeat=n):
        worth = {}
        for x, _ in drawn:
            votes, total = worth.get(x, (0, 0.0))
            worth[x] = votes + 1, total + reward(x, "")
        # max returns the first of several, and a dict keeps the order of arrival
        key = (lambda x: worth[x]) if kind == "majority" else (lambda x: worth[x][1])
        winner = max(worth, key=key)
        law.setdefault(winner, []).append(math.prod(q for _, q in drawn))
    return {x: math.fsum(parts) for x, parts in law.items()}


@pytest.mark.parametrize("kind", ["majority", "weighted"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_law_of_a_vote_is_its_closed_form_where_answers_tie(kind, n):
    spec = {"name": "best_of", "n": n, "aggregation": kind, "scorer": reward}
    assert distance(search_law(spec, SPACE)[0], closed_vote(kind, n)) < EXACT


def test_control_the_vote_is_not_the_law_of_the_best_nor_of_the_other_vote():
    spec = {"name": "best_of", "n": 3, "scorer": reward}
    assert distance(search_law(spec, SPACE)[0], closed_vote("majority", 3)) > WRONG
    assert distance(closed_vote("weighted", 3), closed_vote("majority", 3)) > WRONG


def test_a_majority_goes_by_votes_then_by_total_score_then_by_order():
    majority = read_aggregation("majority")
    assert majority.choose(ballot([9, 1, 2], ["a", "b", "b"])) == 2  # its best candidate
    assert majority.choose(ballot([1, 2, 2, 2], ["a", "b", "a", "b"])) == 1
    assert majority.choose(ballot([1, 1], ["a", "b"])) == 0
    assert majority.choose(ballot([1, 1, 1], ["a", "b", "b"], [3, 1, 1])) == 0


def test_a_tie_of_sums_does_not_hang_on_the_order_of_their_terms():
    majority = read_aggregation("majority")
    scores = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    assert majority.choose(ballot(scores, ["a", "a", "a", "b", "b", "b"])) == 2
    assert sum(scores[:3]) != sum(scores[3:])


def test_a_weighted_vote_goes_by_the_sum_of_scores():
    weighted = read_aggregation("weighted")
    assert weighted.choose(ballot([5, 1, 1, 1], list("abbb"))) == 0
    assert weighted.choose(ballot([2, 1, 1, 1], list("abbb"))) == 1
    shares = weighted.shares(ballot([2, 1, 1, 1], list("abbb")))
    assert shares == pytest.approx([0.4, 0.6, 0.6, 0.6])


@pytest.mark.parametrize("seed", range(5))
def test_a_tournament_without_a_judge_is_the_best(seed):
    scores = np.random.default_rng(seed).integers(4, size=7)
    made = ballot(scores, list("abcdefg"))
    assert read_aggregation("tournament").choose(made) == read_aggregation("best").choose(made)


def test_a_tournament_counts_again_among_those_that_are_left():
    # a beats b, b beats c, c beats a, and d loses to all but beats a
    beats = {("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("b", "d"), ("c", "d")}
    judge = {"name": "tournament", "judge": lambda x, y: 1 if (x, y) in beats else -1}
    # standings: a 1-2, b 2-1, c 2-1, d 1-2: the later of a and d leaves, then of a, b, c the last
    assert read_aggregation(judge).choose(ballot([0] * 4, list("abcd"))) == 0
    counted_once = np.array([1 - 2, 2 - 1, 2 - 1, 1 - 2]).argmax()
    assert counted_once == 1  # the control: one count for all rounds chooses another


def decode(spec, context=(0, 1, 2)):
    target = judged_target(space_of((6,), 4), context)
    return resolve_sampler(spec)[0](target, CounterRNG(list(context)))


@pytest.mark.parametrize("kind", NAMES)
def test_one_sample_is_the_base_token_for_token(kind):
    one = decode({"name": "best_of", "n": 1, "aggregation": kind, "scorer": reward})
    assert one.tokens.equal(decode("autoregressive").tokens)
    assert one.candidates[0][0].chosen


@pytest.mark.parametrize("kind", NAMES)
def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch(kind):
    spec = {"name": "best_of", "n": 5, "aggregation": kind, "scorer": reward}
    joint, turned = decode(spec), decode(spec, (2, 1, 0))
    assert joint.tokens.equal(turned.tokens.flip(0))
    assert joint.tokens[2:3].equal(decode(spec, (2,)).tokens)


def test_votes_are_shares_of_the_candidates():
    spec = {"name": "majority_vote", "n": 6, "scorer": reward}
    for found in decode(spec).candidates:
        weight = {tuple(c.tokens.tolist()): c.weight for c in found}
        assert sum(weight.values()) == pytest.approx(1)
        winner = next(c for c in found if c.chosen)
        assert winner.weight == max(weight.values())


@pytest.mark.parametrize("preset", ["majority_vote", "weighted_vote", "tournament"])
def test_presets_name_their_aggregation(preset):
    sampler, _ = resolve_sampler({"name": preset, "scorer": reward})
    assert sampler.aggregation in registry.table("aggregation")
    assert sampler.guarantee == "approximate"


def test_an_unknown_aggregation_or_judge_is_refused_with_the_nearest_name():
    with pytest.raises(GenError, match="Did you mean 'majority'"):
        resolve_sampler({"name": "best_of", "aggregation": "majorty"})
    with pytest.raises(GenError, match="judge"):
        resolve_sampler({"name": "best_of", "aggregation": {"name": "tournament", "juge": 1}})
    with pytest.raises(GenError, match="a function of two answers"):
        resolve_sampler({"name": "best_of", "aggregation": {"name": "tournament", "judge": 1}})


def test_a_judge_that_fails_or_returns_no_number_is_one_error():
    def failing(one, other):
        raise KeyError("x")

    for judge, words in ((failing, "KeyError"), (lambda a, b: math.nan, "nan")):
        with pytest.raises(GenError, match=words):
            decode(
                {
                    "name": "best_of",
                    "aggregation": {"name": "tournament", "judge": judge},
                    "scorer": reward,
                }
            )
