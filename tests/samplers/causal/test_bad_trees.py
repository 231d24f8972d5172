"""Trees of drafts that cannot be: each is one clear error."""

from __future__ import annotations

import pytest
import torch
from constraint_bench import SAMPLING_CASES
from small_llama import small_llama
from tabular import TabularCausal, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import CausalLM
from gen.samplers.causal.drafters.base import DraftSource

TREE = {"shape": "branching", "verifier": "recursive"}
CASES = [
    ({"shape": "branching"}, "sampler.verifier is 'token'; expected one that judges trees"),
    ({"shape": "brnching"}, "unknown shape 'brnching' in sampler.shape. Did you mean 'branching'"),
    ({**TREE, "verifier": "typical"}, "relaxed ones belong to the sampler relaxed_acceptance"),
    ({**TREE, "branching": "3-x"}, "sampler.branching is '3-x'; expected numbers of children"),
    ({**TREE, "branching": "32-32"}, "expected a tree of at most 1024 drafts, not 1,056"),
    (
        {**TREE, "shape": "best_first", "nodes": 2000},
        "best_first with 2,000 drafts'; expected a",
    ),
    ({**TREE, "shape": "paths", "paths": 300}, "paths with 1,200 drafts'; expected a tree of at"),
    ({**TREE, "shape": "stochastic_beam", "beam_width": 200}, "stochastic_beam with 1,600 drafts"),
    ({**TREE, "shape": "optimal", "nodes": 500}, "sampler.nodes is 500; expected 1 to 128"),
    (
        {**TREE, "shape": "optimal", "acceptance_by_rank": "0.9,0.8"},
        "sampler.acceptance_by_rank is '0.9,0.8'; expected numbers between 0 and 1",
    ),
    ({**TREE, "draws": "iid"}, "sampler.draws is 'iid'; expected with_replacement or"),
    (
        {**TREE, "verifier": "k_seq", "draws": "ranks"},
        "sampler.draws is 'ranks'; expected a way that all parts take: .* k_seq takes with_repl",
    ),
    (
        {"shape": "beam", "verifier": "k_seq"},
        "no way that all parts take: sampler.shape beam takes ranks; sampler.verifier k_seq takes",
    ),
    ({"draws": "position_noise"}, "sampler.verifier token takes ranks, with_replacement"),
    ({**TREE, "policy": "heuristic"}, "sampler.policy is 'heuristic'; expected constant"),
    (
        {**TREE, "num_speculative_tokens": "auto"},
        "sampler.num_speculative_tokens is 'auto'; expected a number",
    ),
]


@pytest.mark.parametrize(("params", "says"), CASES)
def test_parts_that_do_not_fit_are_refused(params, says):
    with pytest.raises(GenError, match=says):
        resolve_sampler({"name": "speculative", **params})


class Tokens(DraftSource):
    """Source that knows tokens and no distribution."""

    draws = ("ranks",)


def test_a_verifier_that_reads_a_distribution_refuses_a_drafter_without_one(monkeypatch):
    table = {**registry.table("drafter"), "tokens": Tokens}
    monkeypatch.setitem(registry._kinds, "drafter", table)
    with pytest.raises(GenError, match="sampler.drafter tokens takes ranks"):
        resolve_sampler({"name": "speculative", "drafter": "tokens", **TREE, "verifier": "k_seq"})


def decode(params, sampling=SAMPLING_CASES["plain"], draft_ids=3, model=None):
    sampler = resolve_sampler({"name": "speculative", **params})[0]
    target = causal_target(model or TabularCausal(3), space_of((3,), 3), sampling, [0])
    small = TabularCausal(draft_ids, seed=5)
    draft = causal_target(small, space_of((3,), draft_ids), sampling, [0])
    return sampler(target, CounterRNG([1]), draft=draft)


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(GenError, match="the draft model has 4 ids; expected the target's 3 ids"):
        decode(TREE, draft_ids=4)


def test_the_verifier_greedy_asks_for_temperature_0():
    greedy = {**TREE, "verifier": "greedy"}
    with pytest.raises(GenError, match="sampling.temperature is 1.0; expected 0 with sampler.veri"):
        decode(greedy)
    decode(greedy, SamplingParams(temperature=0.0))


@pytest.mark.slow
def test_a_compiled_forward_takes_a_tree():
    """Branch slots lie above those of positions, so a graph takes slots beside positions."""
    plain, fast = (CausalLM(small_llama(20, layers=1)) for _ in range(2))
    compiled_forward(fast, "eager")
    want, got = (decode(TREE, model=model) for model in (plain, fast))
    assert torch.equal(got.tokens, want.tokens)
