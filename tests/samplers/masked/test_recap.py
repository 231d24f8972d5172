"""ReCAP, the cache policy ``partial``, on token ids: groups of announced positions, local forward
passes that equal full ones where they must, and costs."""

from __future__ import annotations

import math

import pytest
import torch
from cache_bench import MASK, ROWS, SAMPLING_CASES, P, T, canvas, decode, model, target
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.models.adapters.language_models import MaskedLM
from gen.models.targets.cached_masked import CachedMaskedTarget, cached
from gen.models.targets.partial import Plan
from gen.pipeline.pipeline import load
from gen.samplers.masked import announced, loop
from gen.samplers.masked.step import COUNTED, needs_of

PARTIAL = {
    "cache": "partial",
    "blocks": "whole",
    "block_length": 0,
    "cache_warmup": 2,
    "choice_temperature": 2.0,
}
EXACT, SAME = 1e-10, 1e-12
COUNTING = [n for n, part in registry.table("selector").items() if COUNTED in needs_of(part)]


def groups_of(monkeypatch, of, **params) -> list[list[dict]]:
    """What every row did, step by step: whether it was local, the group, what was committed."""
    rows: list[list[dict]] = [[] for _ in range(ROWS)]
    commit = loop.commit

    def noted(run, step, selected, revision):
        change = commit(run, step, selected, revision)
        for n, row in enumerate(step.rows.tolist()):
            rows[row].append(
                {
                    "local": bool(step.memory["is_local"][n]),
                    "group": step.memory["group"][n],
                    "score": step.score[n],
                    "committed": change.committed[n],
                }
            )
        return change

    with monkeypatch.context() as patch:
        patch.setattr(loop, "commit", noted)
        decode(of, **PARTIAL | params)
    return rows


def check_groups(rows: list[list[dict]]) -> None:
    """The groups of a row cover its masked positions, each once, and are committed by rank."""
    for steps, masked in zip(rows, canvas() == MASK, strict=True):
        total = torch.zeros(T, dtype=torch.long)
        rest, last = torch.zeros(T, dtype=torch.bool), math.inf
        for step in steps:
            if not step["local"]:
                assert not bool(rest.any()), "a group was left before all of it was committed"
                total += step["group"].long()
                rest, last = step["group"].clone(), math.inf
            scores = step["score"][step["committed"]]
            assert bool((step["committed"] <= rest).all()), "committed outside of the group"
            assert float(scores.max()) <= last, "committed out of the order announced"
            rest, last = rest & ~step["committed"], float(scores.min())
        assert torch.equal(total, masked.long()), "the groups are not all masked positions, once"


# --- the groups


@pytest.mark.parametrize("refresh", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama", {"order": "confidence"}),
        ("grid_shifted", {"order": "halton", "schedule": "cosine"}),
        ("llama_shifted", {"order": "entropy", "blocks": "fixed", "block_length": 8}),
    ],
)
def test_groups_are_all_masked_positions_and_none_twice(name, params, refresh, monkeypatch):
    rows = groups_of(monkeypatch, target(model(name)), cache_refresh=refresh, **params)
    check_groups(rows)
    runs = ["".join("l" if s["local"] else "f" for s in steps).split("f") for steps in rows]
    assert max(len(run) for row in runs for run in row) == refresh - 1


@pytest.mark.parametrize("selector", COUNTING)
def test_every_selector_that_counts_can_announce(selector, monkeypatch):
    assert {"schedule", "even", "dream"} <= set(COUNTING)
    for steps in (3, 8, T):
        params = {"selector": selector, "order": "confidence", "steps": steps}
        check_groups(groups_of(monkeypatch, target(model("llama")), cache_refresh=3, **params))


def test_control_groups_that_announce_too_many_are_found(monkeypatch):
    right = announced.announced

    def greedy(parts, params, step, score, num_next):
        return right(parts, params, step, score, num_next + 1)

    monkeypatch.setattr(announced, "announced", greedy)
    with pytest.raises(AssertionError, match="left before|not all masked"):
        check_groups(
            groups_of(monkeypatch, target(model("llama")), cache_refresh=2, order="confidence")
        )


def test_control_scores_of_the_local_pass_are_not_the_announced_order(monkeypatch):
    """Where they were used, a group of three steps would be committed in another order."""
    real = announced.announcing

    def forgetful(parts, params):
        changed = real(parts, params)

        def order(step):
            changed.order(step)
            return parts.order(step)

        return announced.replace(changed, order=order)

    monkeypatch.setattr(loop, "announcing", forgetful)
    with pytest.raises(AssertionError):
        check_groups(
            groups_of(
                monkeypatch, target(model("llama")), cache_refresh=4, order="confidence", steps=T
            )
        )


# --- local 0 is the base


@pytest.mark.parametrize("sampling", SAMPLING_CASES)
@pytest.mark.parametrize(
    "params",
    [
        {"order": "confidence", "schedule": "cosine"},
        {"order": "random", "selector": "even"},
        {"order": "halton_rolled", "proposer": "sharpening", "schedule": "arccos"},
        {"order": "margin", "blocks": "fixed", "block_length": 4},
    ],
)
@pytest.mark.thinned(3)
def test_without_local_passes_it_is_the_base_with_the_same_draws(params, sampling):
    net, params = model("llama_shifted"), PARTIAL | params
    few = {"cache_refresh": 3, "cache_warmup": 0}
    base = decode(target(net, SAMPLING_CASES[sampling]), **params | {"cache": "none"})
    found = decode(target(net, SAMPLING_CASES[sampling]), **params, cache_refresh=1)
    local = decode(target(net, SAMPLING_CASES[sampling]), **params | few)
    assert torch.equal(found.tokens, base.tokens) and not torch.equal(local.tokens, base.tokens)
    for a, b, c in zip(found.stats, base.stats, local.stats, strict=True):
        assert (a.nfe, a.tokens_computed, a.partial_nfe) == (b.nfe, b.tokens_computed, 0)
        assert b.partial_nfe is None and c.partial_nfe and c.tokens_computed < b.tokens_computed


def test_the_preset_is_the_base_where_all_passes_warm_up():
    sampler, _ = resolve_sampler({"name": "recap", "cache_warmup": 20})
    plain, _ = resolve_sampler({"name": "recap", "cache": "none"})
    one, two, three = (
        s(target(model("llama")), CounterRNG(range(ROWS)), canvas=canvas())
        for s in (sampler, plain, resolve_sampler("recap")[0])
    )
    assert torch.equal(one.tokens, two.tokens) and not torch.equal(one.tokens, three.tokens)


# --- a local pass


def passes(of: CachedMaskedTarget, plans: list[Plan], canvases: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of forward passes with these plans."""
    found = []
    for plan, tokens in zip(plans, canvases, strict=True):
        of._plan = plan
        found.append(of.predict(tokens).logprobs)
    return found


def plans(rows: int, group: Tensor | None) -> tuple[Plan, Plan]:
    """A full pass, and a local one of some positions (bool [b, T]), or of all columns."""
    everything = torch.ones(rows, P + T, dtype=torch.bool)
    compute = everything if group is None else torch.nn.functional.pad(group, (P, 0))
    yes, no = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    return Plan(everything, everything, yes), Plan(compute, everything, no)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """An empty canvas, the same with part of a group committed, and the group."""
    start, order = torch.full((ROWS, T), MASK), torch.randperm(T, generator=torch.Generator())
    group = torch.zeros(ROWS, T, dtype=torch.bool)
    for row in range(ROWS):
        group[row, order.roll(row)[:6]] = True
    after = start.clone()
    for row in range(ROWS):
        after[row, order.roll(row)[:3]] = torch.arange(3) + row
    return start, after, group


@pytest.mark.parametrize("name", ["llama", "llama_shifted", "grid", "grid_shifted"])
@pytest.mark.parametrize("sampling", SAMPLING_CASES)
def test_a_local_pass_that_freezes_nothing_is_a_full_one(name, sampling):
    of = target(model(name), SAMPLING_CASES[sampling])
    start, after, group = drawn()
    full, local = plans(ROWS, None)
    true = of.predict(after).logprobs.exp()
    found = passes(cached(of, None), [full, local], [start, after])[1]
    assert float((found.exp() - true).abs().max()) < EXACT
    full, local = plans(ROWS, group)  # the control: with a frozen set it is not
    found = passes(cached(of, None), [full, local], [start, after])[1].exp()
    assert float((found - true).abs()[group].max()) > 1e-6


@pytest.mark.parametrize("name", ["llama", "grid", "grid_shifted"])
def test_with_one_layer_a_local_pass_is_a_full_one_and_with_two_it_is_not(name):
    """Keys of one layer are of the own token alone; so a wrong slot, position or row would show."""
    start, after, group = drawn()
    full, local = plans(ROWS, group)
    masked = group & (after == MASK)
    for layers, same in ((1, True), (2, False)):
        of = target(model(name, layers=layers), SAMPLING_CASES["guided"])
        true = of.predict(after).logprobs.exp()
        found = passes(cached(of, None), [full, local], [start, after])[1].exp()
        error = float((found - true).abs()[masked].max())
        assert error < SAME if same else error > 1e-6


class Unread(MaskedLM):
    """A control: a cache that is never read. Positions see those of their own pass alone."""

    def part(self, tokens, positions, seen, cache, keep, rows=None):
        here = torch.zeros_like(seen).scatter(1, positions, True)
        return super().part(tokens, positions, seen & here, cache, keep, rows)


def test_control_a_cache_that_is_never_read_is_found():
    start, after, group = drawn()
    full, local = plans(ROWS, group)
    masked = group & (after == MASK)
    of = target(model("llama", layers=1, adapter=Unread))
    true = of.predict(after).logprobs.exp()
    found = passes(cached(of, None), [full, local], [start, after])
    assert float((found[1].exp() - true).abs()[masked].max()) > 1e-6
    assert float((found[0].exp() - of.predict(start).logprobs.exp()).abs().max()) < EXACT


# --- costs


@pytest.mark.parametrize(("steps", "warm", "refresh"), [(8, 2, 2), (8, 0, 4), (16, 16, 2)])
@pytest.mark.parametrize("condition", [False, True])
def test_passes_are_full_and_local_ones_and_positions_those_of_the_groups(
    steps, warm, refresh, condition
):
    start = torch.full((1, T), MASK)
    params = {"steps": steps, "cache_warmup": warm, "cache_refresh": refresh}
    more = {"schedule": "linear", "cache_condition": condition}
    out = decode(target(model("llama"), rows=[0]), [0], start, **PARTIAL | params | more)
    (stats,), each = out.stats, T // steps
    full = warm + math.ceil((steps - warm) / refresh)
    assert (stats.nfe, stats.nfe - stats.partial_nfe) == (steps, full)
    group = each * refresh + P * condition
    assert stats.tokens_computed == full * (P + T) + (steps - full) * group


# --- the embedded models

FAST = ("text", "action")
MODALITIES = [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
    for name in ("text", "action", "motion", "speech", "image", "video")
]


@pytest.mark.parametrize("modality", MODALITIES)
def test_every_masked_model_of_the_zoo_takes_it(modality):
    pipe = load(modality, dtype="float64")
    prompt, spec = pipe.modality.example_prompts(1, 0), {"name": "maskgit", "steps": 8}
    few = {"cache": "partial", "cache_warmup": 2}
    base, same, local = (
        pipe(prompt, {**spec, **more}, seed=1) for more in ({}, few | {"cache_refresh": 1}, few)
    )
    assert torch.equal(same.tokens, base.tokens)
    costs = [out.stats[0].tokens_computed for out in (base, same, local)]
    assert costs[0] == costs[1] > costs[2]
    assert (local.stats[0].nfe, local.stats[0].partial_nfe) == (base.stats[0].nfe, 3)


# --- refusals


def test_what_cannot_announce_is_refused():
    for params, words in (
        ({"selector": "threshold"}, "sampler.selector is 'threshold'; expected .*schedule.*cache"),
        ({"remasker": "low_confidence"}, "sampler.remasker is 'low_confidence'; expected none,"),
        ({"blocks": "lookahead", "block_length": 4}, "sampler.blocks is 'lookahead'; expected"),
        ({"cache_warmup": -1}, "sampler.cache_warmup is -1; expected an integer of at least 0"),
        ({"cache_condition": 1}, "sampler.cache_condition is 1; expected true or false"),
    ):
        with pytest.raises(GenError, match=words):
            decode(target(model("llama")), **PARTIAL | params)
