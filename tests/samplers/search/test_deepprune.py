"""DeepPrune on models in closed form, and its judges."""

from __future__ import annotations

import json

import numpy as np
import pytest
from enumeration import distance
from searches_closed_form import judged_target, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.search.judges import FEATURES, Judge, TrainedJudge, features, read_judge

EXACT, WRONG = 1e-12, 1e-3
SPACE, MASKED = space_of((6,), 3), space_of((6,), 3, masked=True)


def nothing(tokens, prompt):
    return 0.0


class Never(Judge):
    """Judge to whom no two samples are alike."""

    def probability(self, tokens, known, first, other):
        return 0.0


class Foresight(Judge):
    """Judge that knows how every sample ends, from the whole outputs of the same call."""

    def __init__(self, tokens):
        self.tokens = tokens  # [n, T]

    def probability(self, tokens, known, first, other):
        return float((self.tokens[first] == self.tokens[other]).all())


def decode(context=(0, 1, 2), space=SPACE, name="deepprune", masked=False, trace=False, **params):
    spec = {"name": name, "base": "autoregressive", "scorer": nothing, **params}
    if name == "deepprune":
        spec = {"start": 1, **spec}
    target = judged_target(space, context, masked=masked)
    return resolve_sampler(spec)[0](target, CounterRNG(list(context)), trace=trace)


def vote(context=(0, 1, 2), **params):
    return decode(context, name="best_of", aggregation="majority", **params)


MASKED_BASE = {"space": MASKED, "masked": True, "base": {"name": "maskgit", "steps": 3}}


@pytest.mark.parametrize("base", [{}, MASKED_BASE])
def test_one_sample_is_the_base_token_for_token(base):
    one = decode(n=1, **base)
    assert one.tokens.equal(vote(n=1, **base).tokens)


@pytest.mark.parametrize("base", [{}, MASKED_BASE])
@pytest.mark.parametrize("free", [{"keep": 9}, {"judge": Never()}])
def test_without_merges_it_is_the_majority_of_all_samples_at_their_cost(base, free):
    pruned, full = decode(n=9, **free, **base), vote(n=9, **base)
    assert pruned.tokens.equal(full.tokens)
    assert [s.nfe for s in pruned.stats] == [s.nfe for s in full.stats]


def test_a_judge_that_knows_the_ends_changes_no_answer_and_saves_passes():
    space = space_of((3,), 2)
    full = vote((0,), space=space, n=9)
    ends = np.stack([c.tokens.numpy() for c in full.candidates[0]])
    pruned = decode((0,), space=space, n=9, judge=Foresight(ends))
    assert pruned.tokens.equal(full.tokens)
    distinct = len({tuple(row) for row in ends.tolist()})
    assert distinct < 9
    assert pruned.stats[0].nfe == 9 + 2 * distinct
    assert full.stats[0].nfe == 9 * 3


def test_equal_beginnings_are_decoded_once_and_weights_are_cluster_sizes():
    out = decode(n=9)
    for found in out.candidates:
        assert sum(c.weight for c in found) == pytest.approx(1)
        going = [c for c in found if c.weight > 0]
        # a sample that is left differs from all others before the last position
        begun = [tuple(c.tokens[:-1].tolist()) for c in going]
        assert len(set(begun)) == len(begun)
        for c in found:
            assert (c.score is None) == (c.weight == 0)
            assert c.known is None or not bool(c.known.all())


def closed_law():
    """Three samples of two tokens, merged where their first tokens are equal, by enumeration."""
    p = causal_distribution(TabularCausal(2, low=0.0), space_of((2,), 2), SamplingParams(), 0)
    first = {a: p[a, 0] + p[a, 1] for a in range(2)}
    law = dict.fromkeys(p, 0.0)
    for count in range(4):  # samples that begin with 0
        ways = (1, 3, 3, 1)[count] * first[0] ** count * first[1] ** (3 - count)
        winner = 0 if count > 1 else 1
        for b in range(2):
            law[winner, b] += ways * p[winner, b] / first[winner]
    return law


SMALL = {"name": "deepprune", "base": "autoregressive", "n": 3, "start": 1, "scorer": nothing}


def test_the_law_is_that_of_the_enumeration():
    assert distance(search_law(SMALL, space_of((2,), 2))[0], closed_law()) < EXACT


def test_control_the_law_is_not_that_of_a_vote_of_all_samples():
    spec = {"name": "best_of", "n": 3, "aggregation": "majority", "scorer": nothing}
    found = search_law({**spec, "base": "autoregressive"}, space_of((2,), 2))[0]
    assert distance(found, closed_law()) > WRONG


@pytest.mark.parametrize("base", [{}, MASKED_BASE])
def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch(base):
    joint = decode(n=7, **base)
    assert joint.tokens.equal(decode((2, 1, 0), n=7, **base).tokens.flip(0))
    alone = decode((1,), n=7, **base)
    assert alone.tokens[0].equal(joint.tokens[1])
    assert alone.stats[0].nfe == joint.stats[1].nfe


def test_a_later_start_costs_more_passes_and_judges_nothing_before():
    early, late = decode(n=9), decode(n=9, start=3)
    assert all(a.nfe < b.nfe for a, b in zip(early.stats, late.stats, strict=True))
    assert all(s.nfe >= 9 * 3 for s in late.stats)


def test_a_budget_leaves_one_whole_output():
    out = decode(n=9, judge=Never(), budget="20 passes")
    full = decode(n=9, judge=Never())
    for stats, found in zip(out.stats, out.candidates, strict=True):
        assert 20 <= stats.nfe < min(s.nfe for s in full.stats)
        assert next(c for c in found if c.chosen).known is None


def test_traces_are_those_of_the_chosen_samples():
    out = decode(n=5, trace=True)
    for tokens, steps in zip(out.tokens, out.traces, strict=True):
        said = {k: v for step in steps for k, v in step.committed.items()}
        assert [said[k] for k in range(SPACE.length)] == tokens.tolist()


def test_features_of_a_pair():
    tokens = np.array([[1, 2, 3, 9], [1, 2, 4, 9]])
    known = np.array([[True, True, True, False]] * 2)
    assert features(tokens, known, 0, 0).tolist() == [1, 1, 1, 1, 0.75]
    found = features(tokens, known, 0, 1)
    assert found == pytest.approx([2 / 3, 2 / 3, 0, 2 / 4, 0.75])


def test_a_trained_judge_is_read_as_it_was_written(tmp_path):
    judge = TrainedJudge((4.0, 1.0, 2.0, 0.5, 1.0), -6.0)
    judge.save(tmp_path / "judge")
    assert read_judge(str(tmp_path / "judge")) == judge
    out = decode(n=9, judge=str(tmp_path / "judge"), threshold=0.8)
    assert out.tokens.shape == (3, 6)


def test_a_judge_of_other_features_is_refused(tmp_path):
    content = {"features": FEATURES[1:], "weights": [1.0] * 4, "bias": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(GenError, match="expected beginning"):
        read_judge(str(tmp_path))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"n": 0}, "sampler.n"),
        ({"threshold": 2.0}, "between 0 and 1"),
        ({"judge": 3}, "sampler.judge"),
        ({"judge": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"aggregation": "majorty"}, "Did you mean 'majority'"),
    ],
)
def test_bad_parameters_are_one_error(wrong, words):
    with pytest.raises(GenError, match=words):
        decode(**wrong)
