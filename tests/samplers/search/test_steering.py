"""Searches that steer: rows of a batch, ancestry, and ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from searches_closed_form import TokenEvaluator
from tabular import TabularCausal, TabularMasked, causal_target, masked_target, space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.search.steering import Steered

V, LENGTH = 5, 8
KEYS = [11, 42, 7, 99, 1234]
CONTEXT = [0, 1, 2, 1, 0]
CAUSAL, MASKED = space_of((LENGTH,), V), space_of((LENGTH,), V + 1, masked=True)
BASES = {
    "autoregressive": {"name": "autoregressive"},
    "jacobi": {"name": "speculative_jacobi", "window": 4},
    "speculative": {"name": "speculative", "num_speculative_tokens": 3},
    "tree": {
        "name": "speculative",
        "verifier": "recursive",
        "shape": "branching",
        "branching": "2-1",
    },
    "masked": {"name": "masked_iterative", "steps": 4},
}
METHODS = {
    "svdd": {"name": "svdd", "m": 3, "alpha": 0.3, "block": 2},
    "svdd_greedy": {"name": "svdd_greedy", "m": 3},
    "smc": {"name": "smc", "particles": 3, "block": 2},
    "smc_adaptive": {"name": "smc_adaptive", "particles": 4, "lam": 2.0},
    "fk": {"name": "fk", "particles": 3, "block": 3},
    "fk_max": {"name": "fk_max", "particles": 3, "lam": 2.0, "select": "draw"},
}


def ends(tokens, prompt):
    """Reward of tokens that depends on all of them and on the prompt."""
    weights = np.arange(1, len(tokens) + 1) + int(prompt)
    return float(np.sin(weights * (np.array(tokens) + 1)).mean())


def decode(method, base, items=(0, 1, 2, 3, 4), space=None, trace=False):
    """Run a search on some items, each with its own prompt and key."""
    spec = {"scorer": ends, "base": BASES[base], **METHODS.get(method, {"name": method})}
    sampler = resolve_sampler(spec)[0]
    masked = base == "masked"
    space = (MASKED if masked else CAUSAL) if space is None else space
    context = [CONTEXT[i] for i in items]
    model = TabularMasked(space.vocab_size, low=0.0) if masked else TabularCausal(V, low=0.0)
    make = masked_target if masked else causal_target
    target = make(model, space, SamplingParams(), context)
    target.evaluator = TokenEvaluator(context)
    draft = None
    if sampler.drafted:
        draft = causal_target(TabularCausal(V, 3, low=0.0), space, SamplingParams(), context)
    rng = CounterRNG([KEYS[i] for i in items])
    return sampler(target, rng, draft=draft, trace=trace)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.thinned(4)
def test_an_item_alone_is_the_item_in_a_batch_in_any_order(method, base):
    batch = decode(method, base)
    order = (3, 0, 4, 2, 1)
    permuted = decode(method, base, order)
    assert torch.equal(permuted.tokens, batch.tokens[list(order)])
    for item in (1, 4):
        alone = decode(method, base, (item,))
        assert torch.equal(alone.tokens[0], batch.tokens[item])
        assert alone.stats[0].nfe == batch.stats[item].nfe
        assert [c.score for c in alone.candidates[0]] == [c.score for c in batch.candidates[item]]


def test_control_resampling_across_items_mixes_them(monkeypatch):
    take = Steered.take

    def pooled(self, index):
        rows = index + np.arange(len(index))[::-1, None] * self.count
        take(self, index)
        self.run.take(rows.reshape(-1), self.particles.rng)

    batch = decode("smc", "autoregressive")
    monkeypatch.setattr(Steered, "take", pooled)
    assert not torch.equal(decode("smc", "autoregressive").tokens, batch.tokens)
    mixed, alone = decode("smc", "autoregressive"), decode("smc", "autoregressive", (1,))
    assert not torch.equal(mixed.tokens[1], alone.tokens[0])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "spec",
    [
        {"name": "svdd", "m": 1},
        {"name": "smc", "particles": 1},
        {"name": "fk", "particles": 1},
        {"name": "smc", "particles": 3, "lambda": 0.0},
        {"name": "fk", "particles": 3, "lambda": 0, "potential": "max"},
        {"name": "best_of", "n": 1},
    ],
    ids=str,
)
@pytest.mark.thinned(4)
def test_the_limit_is_the_base_token_for_token(spec, base, monkeypatch):
    monkeypatch.setitem(METHODS, "limit", spec)
    found = decode("limit", base)
    sampler = resolve_sampler(BASES[base])[0]
    masked = base == "masked"
    space = MASKED if masked else CAUSAL
    model = TabularMasked(space.vocab_size, low=0.0) if masked else TabularCausal(V, low=0.0)
    target = (masked_target if masked else causal_target)(model, space, SamplingParams(), CONTEXT)
    kin = TabularCausal(V, 3, low=0.0)
    draft = causal_target(kin, space, SamplingParams(), CONTEXT) if sampler.drafted else None
    assert torch.equal(found.tokens, sampler(target, CounterRNG(KEYS), draft=draft).tokens)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.thinned(4)
def test_chosen_candidates_are_the_ancestry_of_the_output(method, base):
    out = decode(method, base, trace=True)
    for tokens, found in zip(out.tokens, out.candidates, strict=True):
        levels = [[c for c in found if c.level == n] for n in range(found[-1].level + 1)]
        chosen = [[c for c in level if c.chosen] for level in levels]
        assert all(len(level) == 1 for level in chosen)
        assert torch.equal(chosen[-1][0].tokens, tokens)
        for (before,), level, (after,) in zip(chosen, levels[:-1], chosen[1:], strict=False):
            assert level[after.parent] is before
            assert bool((after.tokens == before.tokens)[before.known].all())
            assert bool((after.known | ~before.known).all())


def test_particles_that_end_early_are_scored_once_and_stay():
    space = replace(CAUSAL, eos_token_id=0)
    for method in METHODS:
        out = decode(method, "autoregressive", space=space)
        for tokens, found in zip(out.tokens.tolist(), out.candidates, strict=True):
            end = tokens.index(0) if 0 in tokens else LENGTH
            assert set(tokens[end:]) <= {0}
            last = [c for c in found if c.level == found[-1].level]
            assert all(bool(c.known.all()) for c in last)


def test_a_run_that_cannot_be_stepped_is_refused():
    with pytest.raises(GenError, match="beam_search cannot be stepped"):
        resolve_sampler({"name": "svdd", "base": "beam_search"})[0].inner.begin(None, None)
