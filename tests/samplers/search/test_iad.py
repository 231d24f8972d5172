"""Iterative agent decoding on models in closed form."""

from __future__ import annotations

import pytest
from enumeration import distance
from searches_closed_form import Judged, judged_target, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams

EXACT, WRONG = 1e-12, 1e-3
SPACE, MASKED, PAIR = space_of((8,), 3), space_of((8,), 3, masked=True), space_of((2,), 3)
CAUSAL_BASE = {"base": "autoregressive"}
MASKED_BASE = {"base": {"name": "maskgit", "steps": 4}}


def twos(tokens, prompt):
    return sum(t == 2 for t in tokens) / len(tokens)


def decode(context=(0, 1, 2), name="iad", trace=False, canvas=None, **params):
    spec = {"name": name, "scorer": twos, **params}
    masked = params["base"] is MASKED_BASE["base"]
    target = judged_target(MASKED if masked else SPACE, context, masked=masked)
    sampler = resolve_sampler(spec)[0]
    return sampler(target, CounterRNG(list(context)), trace=trace, canvas=canvas)


def best_first(partial):
    """Value of a beginning: 1 where it begins with the rewarded token."""
    return float(partial[0] == 2)


def closed_law():
    """Two rounds of one candidate; the second keeps a first token of 2, by enumeration."""
    p = causal_distribution(TabularCausal(3, low=0.0), PAIR, SamplingParams(), 0)
    law = dict.fromkeys(p, 0.0)
    for x, q in p.items():
        kept = x[0] == 2
        rest = sum(r for y, r in p.items() if y[0] == 2) if kept else 1.0
        for y, r in p.items():
            if kept and y[0] != 2:
                continue
            better = sum(t == 2 for t in y) > sum(t == 2 for t in x)
            law[y if better else x] += q * r / rest
    return law


LAW = {
    "name": "iad",
    "base": "autoregressive",
    "n": 1,
    "rounds": 2,
    "keep": 0.5,
    "value": Judged(best_first),
    "scorer": twos,
}


def test_the_law_of_two_rounds_is_that_of_the_enumeration():
    assert distance(search_law(LAW, PAIR)[0], closed_law()) < EXACT


def test_control_without_conditioning_the_law_is_another():
    assert distance(search_law({**LAW, "keep": 0.0}, PAIR)[0], closed_law()) > WRONG


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
def test_one_round_is_the_best_of_n_and_one_candidate_the_base(base):
    one = decode(n=3, rounds=1, **base)
    assert one.tokens.equal(decode(name="best_of", n=3, **base).tokens)
    single = decode(n=1, rounds=1, **base)
    assert single.tokens.equal(decode(name="best_of", n=1, **base).tokens)


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
def test_rounds_that_keep_nothing_are_the_best_of_all_their_samples(base):
    found, full = decode(n=2, rounds=3, keep=0.0, **base), decode(name="best_of", n=6, **base)
    assert found.tokens.equal(full.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in full.stats]


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
def test_control_rounds_that_keep_a_part_are_not(base):
    found = decode(n=2, rounds=3, keep=0.5, **base)
    assert not found.tokens.equal(decode(name="best_of", n=6, **base).tokens)


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
def test_the_best_score_never_falls_and_is_that_of_the_output(base):
    out = decode(n=2, rounds=5, **base)
    for tokens, found in zip(out.tokens, out.candidates, strict=True):
        best = max(c.score for c in found)
        chosen = next(c for c in found if c.chosen)
        assert chosen.score == best == twos(tokens.tolist(), "")
        assert chosen.tokens.equal(tokens)


@pytest.mark.parametrize("feedback", ["random", "credit"])
def test_a_masked_round_keeps_the_stated_share_of_its_parent(feedback):
    out = decode(n=2, rounds=4, keep=0.75, feedback=feedback, **MASKED_BASE)
    seen = 0
    for found in out.candidates:
        levels = [[c for c in found if c.level == level] for level in range(4)]
        for level in range(1, 4):
            for c in levels[level]:
                if c.parent is not None:
                    parent = levels[level - 1][c.parent]
                    assert int((c.tokens == parent.tokens).sum()) >= 6
                    seen += 1
    assert seen


def test_a_causal_round_keeps_the_beginning_of_its_parent_and_computes_it_in_one_pass():
    out = decode(n=2, rounds=2, keep=0.5, **CAUSAL_BASE)
    for found, stats in zip(out.candidates, out.stats, strict=True):
        first, second = found[:2], found[2:]
        for c in second:
            assert c.tokens[:4].equal(first[c.parent].tokens[:4])
        assert stats.nfe == 2 * 8 + 2 * (1 + 4)


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch(base):
    more = {"n": 2, "rounds": 3, **base}
    joint = decode(**more)
    assert joint.tokens.equal(decode((2, 1, 0), **more).tokens.flip(0))
    assert decode((1,), **more).tokens[0].equal(joint.tokens[1])


def test_known_tokens_of_a_canvas_stay():
    canvas = MASKED.empty(3, "cpu")
    canvas[:, 3:5] = 1
    out = decode(n=2, rounds=4, keep=0.25, canvas=canvas, **MASKED_BASE)
    assert bool((out.tokens[:, 3:5] == 1).all())
    assert not bool(MASKED.is_masked(out.tokens).any())


def test_an_item_that_reaches_the_threshold_is_done():
    free, short = decode(rounds=5, **CAUSAL_BASE), decode(rounds=5, threshold=0.0, **CAUSAL_BASE)
    assert all(a.nfe > b.nfe for a, b in zip(free.stats, short.stats, strict=True))
    assert {len(found) for found in short.candidates} == {2}


def test_a_budget_ends_the_rounds():
    out = decode(n=1, rounds=9, budget="8 passes", **CAUSAL_BASE)
    assert [s.nfe for s in out.stats] == [8] * 3


@pytest.mark.parametrize("base", [CAUSAL_BASE, MASKED_BASE])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_traces_are_those_of_the_chosen_candidates(base, keep):
    out = decode(n=2, rounds=3, keep=keep, trace=True, **base)
    for tokens, steps in zip(out.tokens, out.traces, strict=True):
        said = {k: v for step in steps for k, v in step.committed.items()}
        assert [said[k] for k in range(8)] == tokens.tolist()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"rounds": 0}, "sampler.rounds"),
        ({"keep": 1.5}, "between 0 and 1"),
        ({"feedback": "praise"}, "random or credit"),
        ({"budget": "0 passes"}, "budget"),
    ],
)
def test_bad_parameters_are_one_error(wrong, words):
    with pytest.raises(GenError, match=words):
        decode(**{**CAUSAL_BASE, **wrong})
