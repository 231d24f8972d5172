"""Drafts from a mixture of the drafts before them, and drafts that share the target's noise."""

from __future__ import annotations

import pytest
import torch
from constrained import exact_length, with_end
from constraint_bench import COMBINED, EXACT, WRONG, autoregressive, error, run, speculative
from small_llama import small_llama
from tabular import space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.shapes.base import NodeDrafter

SHAPES = {
    "branching": {"shape": "branching", "branching": "2-1"},
    "paths": {"shape": "paths", "paths": 2, "path_length": 2},
    "optimal": {
        "shape": "optimal",
        "nodes": 3,
        "tree_depth": 2,
        "acceptance_by_rank": "0.5,0.3",
    },
    "beam": {"shape": "beam", "beam_width": 2, "tree_depth": 2, "nodes": 3},
    "chain": {"shape": "chain", "num_speculative_tokens": 2},
}
FAST = {("recursive", "branching"), ("traversal", "optimal"), ("recursive", "beam")}


def cases():
    for name, rule in registry.table("verifier").items():
        if rule.relaxed or rule.needs_greedy:
            continue
        for shape, params in SHAPES.items():
            kind = registry.get("shape", params["shape"])
            judged = rule.judges_trees or kind.is_chain
            if judged and set(kind.takes) & set(rule.draws):
                marks = [] if (name, shape) in FAST else [pytest.mark.slow]
                spec = {"drafter": "superposed", "verifier": name, **params}
                yield pytest.param(spec, id=f"{name}-{shape}", marks=marks)


@pytest.mark.parametrize("params", cases())
def test_the_distribution_is_kept(params):
    assert error(speculative(**params), space_of((4,), 3), COMBINED) < EXACT
    assert error(speculative(**params), with_end(3, 3)) < EXACT


def test_control_the_distribution_of_another_mixture(monkeypatch):
    """Drawn from what stands behind a mixture, claimed to be what stands behind another."""

    grow = NodeDrafter.grow

    def claim(self, step, tokens):
        tree = grow(self, step, tokens)
        tree.logq[:, 1:] = tree.logq[:, 1:].roll(1, -1)
        return tree

    monkeypatch.setattr(NodeDrafter, "grow", claim)
    spec = {"drafter": "superposed", "verifier": "recursive", **SHAPES["branching"]}
    assert error(speculative(**spec), space_of((3,), 3)) > WRONG


def test_a_draft_pass_computes_one_position_per_depth(monkeypatch):
    space, prompts = TokenSpace.codes((3, 4), 24, 20), torch.arange(12).view(3, 4)
    sampling, seen = SamplingParams(temperature=0.8), []

    def note(self, tokens, weights, positions, _true=CausalTarget.predict_superposed):
        seen.append((tuple(tokens.shape), weights.sum(-1)))
        return _true(self, tokens, weights, positions)

    monkeypatch.setattr(CausalTarget, "predict_superposed", note)
    models = (small_llama(24, seed=n) for n in (0, 1))
    target, draft = (CausalTarget(CausalLM(m), prompts, space, sampling) for m in models)
    spec = {"drafter": "superposed", "verifier": "recursive", "branching": "3-2-1"}
    out = speculative(shape="branching", **spec)(target, CounterRNG([3, 4, 5]), draft=draft)
    assert seen and all(shape[1] == 1 for shape, _ in seen)
    assert all(torch.allclose(total, torch.ones_like(total)) for _, total in seen)
    # the root, and the two depths that have children
    assert all(s.draft_nfe <= 3 * s.nfe for s in out.stats)


def test_constraints_and_models_that_take_ids_alone_are_refused(monkeypatch):
    spec = {"drafter": "superposed", "verifier": "recursive", **SHAPES["branching"]}
    with pytest.raises(GenError, match="the drafter superposed came with a constraint"):
        run(speculative(**spec), exact_length(4, 4))
    with pytest.raises(GenError, match="sampler.shape is 'best_first'; expected one that grows"):
        speculative(drafter="superposed", shape="best_first", verifier="recursive")
    from tabular import TabularCausal

    monkeypatch.setattr(TabularCausal, "superposes", False)
    with pytest.raises(GenError, match="the drafter superposed needs a model that takes weighted"):
        run(speculative(**spec), space_of((4,), 3))


def test_shared_noise_gives_the_same_tokens_in_fewer_passes():
    """Whatever drafts: the tokens of plain autoregression with the same seed."""
    sampler, space = resolve_sampler("drafter_invariant")[0], space_of((24,), 4)
    assert sampler.guarantee == "same_tokens"
    shared, want = run(sampler, space), run(autoregressive(), space)
    assert torch.equal(shared.tokens, want.tokens)
    own = run(speculative(verifier="follow"), space)
    assert torch.equal(own.tokens, want.tokens)
    passes = [sum(s.nfe for s in out.stats) for out in (shared, own, want)]
    assert passes[0] < passes[1] < passes[2]


@pytest.mark.slow
def test_shared_noise_keeps_the_distribution():
    sampler = resolve_sampler({"name": "drafter_invariant", "num_speculative_tokens": 2})[0]
    assert error(sampler, space_of((3,), 3)) < EXACT
    assert error(sampler, space_of((4,), 3), COMBINED) < EXACT
