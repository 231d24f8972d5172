"""A*-decoding on models in closed form."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from enumeration import distance
from searches_closed_form import Judged, judged_target, search_law
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.search.resume import load

EXACT, WRONG = 1e-12, 1e-3
PAIR, SPACE = space_of((2,), 3), space_of((6,), 4)
BASES = [
    "autoregressive",
    {"name": "speculative_jacobi", "coupling": "gumbel", "window": 3},
    {"name": "speculative_jacobi", "coupling": "fresh", "window": 3},
]


def reward(tokens, prompt):
    return float(tokens[1] == 2)


def promise(partial):
    """Value of a beginning: its first token; of a whole output what the scorer says."""
    return float(partial[0] == 1) if partial[1] is None else float(partial[1] == 2)


def decode(context=(0, 1, 2), space=SPACE, rng=None, masked=False, **params):
    defaults = {"base": "autoregressive", "scorer": even, "value": Judged(share_even)}
    spec = {"name": "a_star", **defaults, **params}
    target = judged_target(space, context, masked=masked)
    return resolve_sampler(spec)[0](target, rng or CounterRNG(list(context)))


def plain(base, context=(0, 1, 2)):
    target = judged_target(SPACE, context)
    return resolve_sampler(base)[0](target, CounterRNG(list(context)))


def even(tokens, prompt):
    return sum(t % 2 == 0 for t in tokens) / len(tokens)


def share_even(partial):
    known = [t for t in partial if t is not None]
    return sum(t % 2 == 0 for t in known) / max(1, len(known))


def closed_law(goes_back=True):
    """The law of two continuations of one token each, by enumeration of all draws.

    The better beginning is expanded first. Where none of its ends is rewarded and the other one is
    promising too, the search goes back to it.
    """
    joint = causal_distribution(TabularCausal(3, low=0.0), PAIR, SamplingParams(), 0)
    first = {a: math.fsum(p for x, p in joint.items() if x[0] == a) for a in range(3)}
    second = {a: {b: joint[a, b] / first[a] for b in range(3)} for a in range(3)}
    law: dict = {}

    def note(x, p):
        law.setdefault(x, []).append(p)

    for a, b in itertools.product(range(3), repeat=2):
        begun = sorted((a, b), key=lambda t: t != 1)
        for c, d in itertools.product(range(3), repeat=2):
            p = first[a] * first[b] * second[begun[0]][c] * second[begun[0]][d]
            if 2 in (c, d):
                note((begun[0], 2), p)
            elif begun[1] != 1 or not goes_back:
                note((begun[0], c), p)
            else:
                for e, f in itertools.product(range(3), repeat=2):
                    q = p * second[begun[1]][e] * second[begun[1]][f]
                    note((begun[1], 2) if 2 in (e, f) else (begun[0], c), q)
    return {x: math.fsum(parts) for x, parts in law.items()}


SPEC = {
    "name": "a_star",
    "base": "autoregressive",
    "k": 2,
    "block": 1,
    "width": 2,
    "scorer": reward,
    "value": Judged(promise),
}


def test_the_law_is_that_of_the_enumeration_and_earlier_beginnings_are_taken_up_again():
    assert distance(search_law(SPEC, PAIR)[0], closed_law()) < EXACT


def test_control_a_search_that_does_not_go_back_has_another_law():
    found = search_law({**SPEC, "width": 1}, PAIR)[0]
    assert distance(found, closed_law()) > WRONG
    assert distance(found, closed_law(goes_back=False)) < EXACT


# where drafts depend on the window, which a block's end cuts, the law alone is the base's
@pytest.mark.parametrize(
    "base, block", [(b, n) for b in BASES[:2] for n in (1, 2, 4)] + [(BASES[2], 6)]
)
def test_one_continuation_is_the_base_token_for_token(base, block):
    assert decode(base=base, k=1, block=block).tokens.equal(plain(base).tokens)


def test_control_several_continuations_are_not_the_base():
    assert not decode(k=3).tokens.equal(plain("autoregressive").tokens)


@pytest.mark.parametrize("base", BASES)
def test_an_item_is_the_same_alone_and_elsewhere_in_a_batch(base):
    params = {"base": base, "k": 2, "block": 2, "width": 3}
    joint = decode(**params)
    assert joint.tokens.equal(decode((2, 1, 0), **params).tokens.flip(0))
    for item in range(3):
        alone = decode((item,), **params)
        assert alone.tokens[0].equal(joint.tokens[item])
        assert alone.stats[0].nfe == joint.stats[item].nfe


def test_candidates_are_a_tree_of_beginnings_and_the_output_ends_a_chosen_branch():
    out = decode(k=2, block=2, width=3)
    for tokens, found in zip(out.tokens, out.candidates, strict=True):
        levels: dict = {}
        for c in found:
            levels.setdefault(c.level, []).append(c)
        for c in found:
            if c.parent is None:
                assert c.level == 0
                continue
            parent = levels[c.level - 1][c.parent]
            assert c.tokens[parent.known].equal(parent.tokens[parent.known])
            assert parent.chosen or not c.chosen
        last = max((c for c in found if c.chosen), key=lambda c: c.level)
        assert last.tokens.equal(tokens)
        assert [c.level for c in found if c.chosen] == list(range(last.level + 1))


def test_more_continuations_earn_more_at_more_passes():
    context = [i % 3 for i in range(24)]
    rng = CounterRNG(range(24))
    one, four = (decode(context, k=k, block=1, width=8, rng=rng) for k in (1, 4))

    def mean(out):
        return sum(even(t.tolist(), "") for t in out.tokens) / len(out.tokens)

    assert mean(four) > mean(one) + 0.2
    assert min(s.nfe for s in four.stats) > max(s.nfe for s in one.stats)


def test_the_passes_of_all_continuations_are_counted_and_rows_that_wait_are_not():
    out = decode(k=2, block=2, width=3)
    for stats, found in zip(out.stats, out.candidates, strict=True):
        assert stats.nfe == 2 * len(found)  # a block of two tokens each


@pytest.mark.parametrize("unit", ["passes", "tokens"])
def test_a_budget_ends_the_search_with_a_whole_output(unit):
    free = decode(k=4, block=1, width=8, value=Judged(lambda x: 0.0))
    tight = decode(k=4, block=1, width=8, value=Judged(lambda x: 0.0), budget={unit: 10})
    assert max(s.nfe for s in tight.stats) < min(s.nfe for s in free.stats)
    assert tight.tokens.shape == free.tokens.shape
    for stats in tight.stats:
        # the expansion that spends it, and the rest of one output
        assert stats.nfe <= 10 + 4 + SPACE.length


def test_a_price_of_tokens_prefers_shorter_beginnings():
    def expanded(cost):
        found = decode((0,), k=2, block=1, width=8, cost=cost, value=Judged(lambda x: 0.5))
        return sum(c.level == 1 for c in found.candidates[0])

    assert expanded(0.0) == 2 < expanded(1.0)


def test_a_masked_base_is_refused():
    with pytest.raises(GenError, match="left to right"):
        space = space_of((6,), 4, masked=True)
        decode(space=space, base={"name": "maskgit", "steps": 3}, masked=True)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"block": 0}, {"width": 0}, {"budget": "0 passes"}])
def test_bad_parameters_are_one_error(wrong):
    with pytest.raises(GenError, match=next(iter(wrong))):
        decode(**wrong)


@pytest.mark.parametrize("base", BASES)
def test_a_run_that_begins_behind_known_tokens_goes_on_as_the_base_does(base):
    expected = plain(base).tokens
    target = judged_target(SPACE, (0, 1, 2))
    run = resolve_sampler(base)[0].begin(target, CounterRNG([0, 1, 2]))
    lengths = torch.tensor([0, 2, 5]).numpy()
    load(run, expected, lengths)
    while not run.is_over:
        run.step()
    out = run.output()
    if base == "autoregressive" or base["coupling"] == "gumbel":
        assert out.tokens.equal(expected)
    assert out.tokens[2, :5].equal(expected[2, :5])
    if base == "autoregressive":
        assert [s.nfe for s in out.stats] == [6, 1 + 4, 1 + 1]


def test_control_a_run_behind_other_tokens_does_not():
    expected = plain("autoregressive").tokens
    run = resolve_sampler("autoregressive")[0].begin(
        judged_target(SPACE, (0, 1, 2)), CounterRNG([0, 1, 2])
    )
    load(run, (expected + 1) % 4, torch.tensor([3, 3, 3]).numpy())
    while not run.is_over:
        run.step()
    assert not run.output().tokens[:, 3:].equal(expected[:, 3:])
