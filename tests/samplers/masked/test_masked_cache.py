"""Caches of masked models: what each policy keeps exactly, what it leaves stale, what it costs; and
conditions of different lengths.

A model of one layer makes keys out of an id and its position alone. So under it a policy is exact
if every id that changed is computed again, and only then, which tells wrong masks, slots, positions
and rows from what a cache approximates by design.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from cache_bench import (
    BASE,
    MASK,
    ROWS,
    SAMPLING_CASES,
    SPACE,
    P,
    Sampler,
    Seen,
    T,
    V,
    canvas,
    conditions,
    decode,
    model,
    target,
)
from tabular import TabularMasked, masked_target
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import MaskedLM
from gen.models.adapters.slot_cache import SlotLayer
from gen.models.targets.cached_masked import CachedMaskedTarget, cached
from gen.models.targets.masked import MaskedTarget
from gen.models.targets.partial import Plan
from gen.samplers.masked.step import LEFT_OUT_LOGP, needs_of

POLICIES = list(registry.table("cache_policy"))
APPROXIMATE = [p for p in POLICIES if p != "none"]
EXACT, WRONG = 1e-12, 1e-7


CASES = [
    ("llama", "plain"),
    ("llama_shifted", "guided"),
    ("grid", "guided"),
    ("grid_shifted", "plain"),
]


@cache
def uncached(name: str, sampling: str) -> Tensor:
    return decode(target(model(name), SAMPLING_CASES[sampling])).tokens


def errors(
    monkeypatch, of: MaskedTarget, everywhere: bool = False, then: Tensor | None = None, **params
) -> float:
    """The largest error of a fresh distribution that could be committed (or of any fresh one) in a
    run, against the model without a cache. ``then``: the tokens that must come out."""
    found, predict, prepare = [], CachedMaskedTarget.predict, CachedMaskedTarget.prepare

    def noted(self, step):
        self.could = step.masked & step.open
        return prepare(self, step)

    def compared(self, canvas, rows=None):
        out = predict(self, canvas, rows)
        sampling = out.logprobs
        true = predict(self, canvas, torch.arange(len(canvas))).logprobs
        difference = (sampling.exp() - true.exp()).abs().amax(-1)
        assert bool((out.fresh & self.could).any(1)[self.could.any(1)].all())
        found.append(float(difference[out.fresh if everywhere else out.fresh & self.could].max()))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(CachedMaskedTarget, "predict", compared)
        patch.setattr(CachedMaskedTarget, "prepare", noted)
        out = decode(of, **params)
    assert not bool((out.tokens == MASK).any()) and (then is None or torch.equal(out.tokens, then))
    return max(found, default=0.0)


# --- exact where it must be


@pytest.mark.parametrize(("name", "sampling"), CASES)
@pytest.mark.parametrize("policy", APPROXIMATE)
@pytest.mark.thinned(3)
def test_refreshing_every_call_is_no_cache(policy, name, sampling, monkeypatch):
    assert (
        errors(
            monkeypatch,
            target(model(name), SAMPLING_CASES[sampling]),
            True,
            uncached(name, sampling),
            cache=policy,
            cache_refresh=1,
        )
        < EXACT
    )


@pytest.mark.parametrize("policy", APPROXIMATE)
@pytest.mark.thinned(3)
def test_control_refreshing_as_published_is_not(policy, monkeypatch):
    assert (
        errors(monkeypatch, target(model("llama_shifted"), SAMPLING_CASES["guided"]), cache=policy)
        > WRONG
    )


@pytest.mark.parametrize(("name", "sampling"), CASES)
@pytest.mark.parametrize("policy", APPROXIMATE)
@pytest.mark.thinned(3)
def test_with_one_layer_a_policy_is_exact_if_it_computes_all_that_changed(
    policy, name, sampling, monkeypatch
):
    """All but ``freecache``, which leaves the ends of blocks as if they were empty; it is exact
    once they are computed again."""

    def of():
        return target(
            model(name, layers=1), SAMPLING_CASES[sampling], ragged=name.startswith("llama")
        )

    assert errors(monkeypatch, of(), cache=policy, cache_settle=True) < EXACT
    if policy == "freecache":
        assert errors(monkeypatch, of(), cache=policy) > WRONG


class BlockCausal(MaskedLM):
    """Attention full inside blocks of 4 places and causal across them, the condition being before
    the first."""

    def _last(self, positions: Tensor) -> Tensor:
        return P + ((positions - P).div(4, rounding_mode="floor").clamp_min(-1) + 1) * 4 - 1

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        at = torch.arange(ids.shape[1])
        hidden = at > self._last(at)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill(
            hidden, torch.finfo(self.dtype).min
        )
        return self.model(
            input_ids=ids, attention_mask=mask.expand(len(ids), 1, -1, -1), use_cache=False
        ).logits[:, -canvas_length:]

    def _mask(self, positions, seen, cache, rows):
        above = torch.arange(seen.shape[1]) > self._last(positions)[..., None]
        return (
            super()
            ._mask(positions, seen, cache, rows)
            .masked_fill(above[:, None, :, : cache.used], torch.finfo(self.dtype).min)
        )


@pytest.mark.parametrize("policy", ["prefix", "dual", "vicinity"])
def test_under_a_block_causal_mask_finished_blocks_need_no_second_look(policy, monkeypatch):
    """They are computed once when the next begins, and never change after that. ``freecache`` does
    not even do that."""
    start = torch.full((ROWS, T), MASK)
    assert (
        errors(monkeypatch, target(model("llama", 3, BlockCausal)), cache=policy, start=start)
        < EXACT
    )
    assert errors(monkeypatch, target(model("llama", 3)), cache=policy, start=start) > WRONG
    assert (
        errors(monkeypatch, target(model("llama", 3, BlockCausal)), cache="freecache", start=start)
        > WRONG
    )


@pytest.mark.parametrize("policy", ["dual", "prefix", "vicinity", "freecache"])
@pytest.mark.thinned(2)
def test_one_block_that_is_all_there_is_leaves_nothing_to_keep(policy, monkeypatch):
    def empty(sampling):
        return torch.zeros(ROWS, 0, dtype=torch.long) if sampling.guided else None

    for sampling in SAMPLING_CASES.values():
        of = MaskedTarget(
            model("llama"), torch.zeros(ROWS, 0, dtype=torch.long), SPACE, sampling, empty(sampling)
        )
        assert errors(monkeypatch, of, True, cache=policy, blocks="whole", cache_warmup=0) < EXACT
    of = target(
        model("llama")
    )  # but a condition that was computed beside an empty canvas is not what it would be now
    assert (
        errors(monkeypatch, of, cache=policy, blocks="whole", cache_warmup=0, cache_before=0)
        > WRONG
    )


def test_what_delayed_keeps_was_computed_as_what_it_is(monkeypatch):
    """And ``freecache`` keeps places that were empty when they were computed, for ever, unless they
    may settle."""
    stale: dict[str, int] = {}

    def watched(name: str, params: dict):
        policy = registry.get("cache_policy", params["cache"])

        def watch(step, slots):
            plan = policy(step, slots)
            kept = plan.attend & ~plan.compute & ~plan.refresh[:, None] & slots.written
            stale[name] = stale.get(name, 0) + int((kept & ~slots.current).sum())
            return plan

        with monkeypatch.context() as patch:
            patch.setattr(
                "gen.samplers.masked.parts.caches.cached", lambda of, _: cached(of, watch)
            )
            decode(target(model("llama")), **params)

    watched("delayed", {"cache": "delayed"})
    watched("settled", {"cache": "freecache", "cache_settle": True})
    watched("freecache", {"cache": "freecache"})
    assert stale["delayed"] == stale["settled"] == 0 < stale["freecache"]


def test_to_a_window_what_is_behind_it_does_not_exist():
    """The first distribution of the places in it is that of a canvas that ends there; control: with
    all places seen it is not."""
    net, space = model("llama"), TokenSpace.codes((6,), 8, V, MASK)
    short = target(net, space=space).predict(torch.full((ROWS, 6), MASK)).logprobs
    for width, same in ((6, True), (64, False)):
        of = cached(target(net), registry.get("cache_policy", "window"))
        empty = torch.full((ROWS, T), MASK)
        params = Sampler(**{**BASE, "cache_window": width})
        of.prepare(
            SimpleNamespace(
                params=params,
                canvas=empty,
                masked=empty == MASK,
                open=empty == MASK,
                is_first_step=torch.ones(ROWS) > 0,
            )
        )
        out = of.predict(empty)
        sampling, positions = out.logprobs, out.num_computed_tokens
        assert bool(((sampling[:, :6].exp() - short.exp()).abs() < EXACT).all()) == same
        assert (
            positions.tolist() == [P + min(width, T)] * ROWS
            and out.fresh.sum(1).tolist() == [min(width, T)] * ROWS
        )


# --- rows and padding


@pytest.mark.parametrize(("name", "sampling"), CASES[1:3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(3)
def test_a_row_is_the_same_alone_and_in_a_batch(policy, name, sampling):
    net, sampling, ragged = model(name), SAMPLING_CASES[sampling], not name.startswith("grid")
    whole = decode(target(net, sampling, ragged=ragged), cache=policy)
    rows = [[1], [3, 2], [0]][POLICIES.index(policy) % 3]
    part = decode(target(net, sampling, rows, ragged), rows, cache=policy)
    assert torch.equal(part.tokens, whole.tokens[rows])
    assert [s.nfe for s in part.stats] == [whole.stats[r].nfe for r in rows]


@pytest.mark.parametrize("sampling", SAMPLING_CASES)
@pytest.mark.parametrize("name", ["llama", "llama_shifted"])
def test_padding_changes_nothing(name, sampling):
    """Not that of the batch, not more of it, and whatever ids it holds."""
    net, sampling = model(name), SAMPLING_CASES[sampling]
    found = target(net, sampling, ragged=True).predict(canvas()).logprobs
    more = target(net, sampling, ragged=True, extra=3).predict(canvas()).logprobs
    assert torch.equal(found, more)
    for row in range(ROWS):
        alone = target(net, sampling, [row], ragged=True).predict(canvas([row])).logprobs
        assert float((alone.exp() - found[row].exp()).abs().max()) < EXACT
    several = (
        target(net, sampling, ragged=True)
        .predict(canvas([2, 1, 2]), torch.tensor([2, 1, 2]))
        .logprobs
    )
    assert float((several.exp() - found[[2, 1, 2]].exp()).abs().max()) < EXACT


class Counted(MaskedLM):
    """A control: padding is not looked at, but counted as positions."""

    def forward(self, ids, canvas_length, left_padding=None):
        if left_padding is None:
            return super().forward(ids, canvas_length)
        hidden = torch.arange(ids.shape[1]) < left_padding[:, None]
        mask = torch.zeros(ids.shape, dtype=self.dtype).masked_fill(
            hidden, torch.finfo(self.dtype).min
        )[:, None, None]
        with torch.no_grad():
            return self.model(
                input_ids=ids, attention_mask=mask.expand(-1, 1, ids.shape[1], -1), use_cache=False
            ).logits[:, -canvas_length:]


@pytest.mark.parametrize("adapter", [Seen, Counted])
def test_control_padding_that_is_seen_or_counted_is_found(adapter):
    """Counted it is a small error: rotary positions are relative, but their angles are numbers of
    single precision."""
    net = model("llama", adapter=adapter)
    found = target(net, ragged=True).predict(canvas()).logprobs
    alone = target(net, rows=[1], ragged=True).predict(canvas([1])).logprobs
    assert float((alone.exp() - found[1].exp()).abs().max()) > 100 * EXACT


def test_pads_in_front_are_nothing_to_the_model():
    net, ids = model("llama_shifted"), torch.cat([conditions([0], False)[0], canvas([0])], 1)
    for left_padding in (1, 4):
        padded = torch.nn.functional.pad(ids, (left_padding, 0), value=5)
        assert (
            float(
                (net.forward(padded, T, torch.tensor([left_padding])) - net.forward(ids, T))
                .abs()
                .max()
            )
            < EXACT * 100
        )


def test_a_model_with_one_length_of_conditions_says_so():
    for net in (model("grid"), TabularMasked(V)):
        with pytest.raises(GenError, match="the prompts have 1 to 3 tokens; expected one length"):
            target(net, ragged=True).predict(canvas())
    with pytest.raises(GenError, match="a prompt is empty"):
        MaskedTarget(
            model("llama_shifted"), torch.zeros(ROWS, 0, dtype=torch.long), SPACE, SamplingParams()
        ).predict(canvas())


# --- what it costs


@pytest.mark.parametrize("name", ["llama", "llama_shifted"])
def test_a_cache_computes_fewer_places(name):
    empty = torch.full((1, T), MASK)
    cost = {
        p: (
            decode(target(model(name, layers=1), rows=[0]), [0], empty, cache=p, steps=16)
            .stats[0]
            .tokens_computed
        )
        for p in POLICIES
    }
    # one call per place; a block of 4 begins with everything, and its three other calls compute the
    # block, or all from its start on
    full, behind = P + T, [T - 4 * block for block in range(4)]
    usual = {
        "none": 16 * full,
        "dual": 4 * (full + 3 * 4),
        "prefix": sum(full + 3 * n for n in behind),
        "freecache": full - T + sum(4 * n for n in behind),
    }
    # a shifted model takes the place before a block along, while the block's first place is empty
    more = 16 if name.endswith("shifted") else 0
    assert all(n <= cost[p] <= n + more * (p != "none") for p, n in usual.items())
    assert (
        all(cost[p] < cost["none"] for p in APPROXIMATE)
        and cost["dual"] < cost["vicinity"] < cost["none"]
    )


def test_rows_that_begin_a_block_cost_the_others_nothing():
    """Rows 2 and 0 are in different blocks at different times; each costs what it costs alone."""
    net = model("llama")
    both = decode(target(net, rows=[2, 0]), [2, 0], cache="dual")
    alone = [decode(target(net, rows=[r]), [r], cache="dual") for r in (2, 0)]
    assert [s.tokens_computed for s in both.stats] == [a.stats[0].tokens_computed for a in alone]


# --- broken on purpose


class Mixing(SlotLayer):
    """Rows write into one another's slots."""

    def write(self, keys, values):
        few = keys.shape[1] < self.owner.used  # not while all is computed
        keys, values = super().write(keys, values)
        return (keys.roll(1, 0), values.roll(1, 0)) if few else (keys, values)


class Freezing(SlotLayer):
    """A slot keeps what was written first, the keys of an empty place."""

    def write(self, keys, values):
        if self.is_initialized and self.owner.rows is None:
            rows, at = torch.arange(len(self.owner.positions))[:, None], self.owner.positions
            keys, values = self.keys[rows, at], self.values[rows, at]
        return super().write(keys, values)


def with_layer(layer: type):
    class Broken(MaskedLM):
        def new_cache(self, slots):
            cache = super().new_cache(slots)
            cache.layers = [layer(cache) for _ in cache.layers]
            return cache

    return Broken


def test_control_frozen_keys_of_empty_places_are_found(monkeypatch):
    start = torch.full((ROWS, T), MASK)  # so that the first call of all is about empty places
    for layer, wrong in ((SlotLayer, False), (Freezing, True)):
        of = target(model("llama", adapter=with_layer(layer)))
        assert (
            errors(monkeypatch, of, True, start=start, cache="dual", cache_refresh=1) > WRONG
        ) == wrong
        of = target(model("llama", layers=1, adapter=with_layer(layer)))
        assert (errors(monkeypatch, of, start=start, cache="delayed") > WRONG) == wrong


def test_control_a_cache_that_mixes_rows_is_found():
    for layer, same in ((SlotLayer, True), (Mixing, False)):
        net = model("llama", adapter=with_layer(layer))
        whole = decode(target(net), cache="dual").tokens
        assert (
            torch.equal(decode(target(net, rows=[0]), [0], cache="dual").tokens[0], whole[0])
            == same
        )


# --- refusals


def test_what_a_cache_cannot_do_is_said_at_once():
    net = model("llama")
    for params, words in (
        ({"cache": "duel"}, "unknown cache_policy 'duel' in sampler.cache. Did you mean 'dual'"),
        (
            {"cache": "delayed_greedy", "order": "confidence"},
            "sampler.order is 'confidence'; expected random or halton .*or raster, where cache",
        ),
    ):
        with pytest.raises(GenError, match=words):
            decode(target(net), **params)
    with pytest.raises(GenError, match="MaskedTarget of TabularMasked keeps no keys"):
        decode(masked_target(TabularMasked(V), SPACE, SamplingParams(), [0, 1, 2, 0]), cache="dual")

    def nothing(now, slots):
        return Plan(slots.written & False, slots.written | True, slots.steps_since_refresh < 0)

    of = cached(target(net), nothing)
    step = SimpleNamespace(canvas=canvas(), masked=canvas() == MASK, open=torch.ones(ROWS, T) > 0)
    of.prepare(step)
    of.predict(canvas())
    with pytest.raises(GenError, match="computes none of the positions that may be committed"):
        of.prepare(step)


def test_schedules_that_look_at_a_distribution_and_shadows_are_refused():
    names = [n for n in registry.table("block_schedule") if n not in ("whole", "fixed")]
    for name in names:
        with pytest.raises(GenError, match=f"sampler.blocks is {name!r}; expected whole or fixed"):
            decode(target(model("llama")), cache="dual", blocks=name)
    for name, remasker in registry.table("remasker").items():
        if LEFT_OUT_LOGP in needs_of(remasker):
            with pytest.raises(GenError, match=f"sampler.remasker is {name!r}; expected"):
                decode(target(model("llama")), cache="dual", remasker=name)
    assert not bool(
        (
            decode(target(model("llama")), cache="dual", remasker="low_confidence").tokens == MASK
        ).any()
    )
