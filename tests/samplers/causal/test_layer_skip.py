"""Drafts with some of the target's own layers: the network that they come from, and the
distribution of what is committed.

The control mistakes one plan for another and must miss by more than 1e-3.
"""

from __future__ import annotations

import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, error, run, speculative
from small_llama import small_llama
from tabular import space_of
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters import model as drafting
from gen.samplers.causal.drafters.own_layers import EarlyExitParams, LayerSkipParams

PLANS = {
    "layer_skip": {"drafter": "layer_skip", "kept_layers": "0,2"},
    "early_exit": {"drafter": "early_exit", "exit_layer": 2},
}
CHAIN = {"num_speculative_tokens": 2}
TREES = {
    "branching": {"shape": "branching", "branching": "2-1"},
    "paths": {"shape": "paths", "paths": 2, "path_length": 2},
}


def cases():
    for name, plan in PLANS.items():
        for verifier, rule in registry.table("verifier").items():
            if rule.relaxed or rule.needs_greedy:
                continue
            fast = name == "layer_skip" and verifier in ("token", "recursive")
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(
                plan | CHAIN | {"verifier": verifier}, id=f"{name}-{verifier}", marks=marks
            )
            for shape, params in TREES.items():
                takes = registry.get("shape", params["shape"]).takes
                if rule.judges_trees and set(takes) & set(rule.draws):
                    spec = plan | params | {"verifier": verifier}
                    one = pytest.mark.slow if shape == "paths" or not fast else ()
                    yield pytest.param(spec, id=f"{name}-{verifier}-{shape}", marks=one)


@pytest.mark.parametrize("params", cases())
def test_no_plan_changes_the_distribution(params):
    assert error(speculative(**params), space_of((4,), 3), COMBINED) < EXACT
    assert error(speculative(**params), with_end(3, 3)) < EXACT


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_control_the_distribution_of_another_plan(monkeypatch, verifier):
    """Drawn with one plan, claimed to be drawn with another."""

    def start(self, draft, verifier, policy, _true=drafting.ModelDrafter.__init__):
        _true(self, draft, verifier, policy)
        other = draft.with_model(draft.model.with_layers((0,)))
        self.targets, predict, claimed = (draft, other), draft.predict, []

        def both(*args):
            claimed.append(other.predict(*args).logprobs[:, -1])
            return predict(*args)

        def claim(*args, _true=self.propose):
            claimed.clear()
            drafts = _true(*args)
            for column, logq in enumerate(claimed):
                drafts.logq[:, column] = logq
            return drafts

        draft.predict, self.propose = both, claim

    monkeypatch.setattr(drafting.ModelDrafter, "__init__", start)
    sampler = speculative(**PLANS["layer_skip"], **CHAIN, verifier=verifier)
    assert error(sampler, space_of((3,), 3)) > WRONG


@pytest.mark.parametrize("policy", ["constant", "joint_confidence", "acceptance_average"])
def test_length_policies_go_with_it(policy):
    sampler = speculative(**PLANS["layer_skip"], policy=policy, num_speculative_tokens=4)
    assert not sampler.drafted
    assert all(s.draft_nfe for s in run(sampler).stats)


def test_windows_begin_with_the_layers_that_the_drafters_keep():
    """speculative_jacobi states the defaults of drafters whose file it does not import."""
    jacobi = registry.get("sampler", "speculative_jacobi")()
    assert jacobi.kept_layers == LayerSkipParams.kept_layers
    assert jacobi.exit_layer == EarlyExitParams.exit_layer


def test_a_share_keeps_the_first_and_the_last_layer():
    plans = {share: LayerSkipParams(share).plan(8) for share in ("1/2", "3/4", "1/8", "1/1")}
    assert plans["1/2"] == (0, 2, 5, 7) and plans["1/8"] == (0,)
    assert plans["3/4"] == (0, 1, 3, 4, 6, 7) and plans["1/1"] == tuple(range(8))
    assert LayerSkipParams("0,2-4,7").plan(8) == (0, 2, 3, 4, 7)


def qwen3(layers: int):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("make", [lambda: small_llama(24, layers=4), lambda: qwen3(4)])
def test_the_draft_is_the_network_of_the_kept_layers(make):
    """With a cache of its own, against a whole network that has those layers alone."""
    model = make()
    adapter, known = CausalLM(model), [name for name, _ in model.named_parameters()]
    skipping = adapter.with_layers((0, 3))
    layers = model.model.layers
    want = make()
    want.model.layers = nn.ModuleList([layers[0], layers[3]])
    tokens = torch.arange(1, 11).view(2, 5)
    found, cache = [], skipping.new_cache(8)
    for n in range(5):
        at = torch.full((2, 1), n)
        found.append(skipping.forward(tokens[:, n : n + 1], at, cache))
    want.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "layers" not in k}, strict=False
    )
    for n, layer in enumerate(want.model.layers):
        layer.self_attn.layer_idx = n
    expected = want(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-9)
    # the network itself is as it was, and nothing was copied
    assert len(model.model.layers) == 4 == adapter.num_layers
    assert [name for name, _ in model.named_parameters()] == known
    kept = {id(p) for p in skipping.model.parameters()}
    assert kept < {id(p) for p in model.parameters()}


def test_all_layers_are_the_target_itself():
    space, prompts = TokenSpace.codes((3, 4), 24, 20), torch.arange(12).view(3, 4)
    sampling = SamplingParams(temperature=0.8)

    def decoded(**params):
        target = CausalTarget(CausalLM(small_llama(24, layers=4)), prompts, space, sampling)
        return speculative(**params)(target, CounterRNG([3, 4, 5]))

    whole = decoded(drafter="layer_skip", kept_layers="0-3", num_speculative_tokens=3)
    assert [s.draft_acceptance_rate for s in whole.stats] == [1.0] * 3
    one = decoded(drafter="layer_skip", kept_layers="1", num_speculative_tokens=3)
    assert any(s.draft_acceptance_rate < 1 for s in one.stats)
    exits = decoded(drafter="early_exit", exit_layer=4, num_speculative_tokens=3)
    assert torch.equal(exits.tokens, whole.tokens)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"kept_layers": "all"}, "sampler.kept_layers is 'all'; expected a share of the layers"),
        ({"kept_layers": "2,1"}, "sampler.kept_layers is '2,1'; expected a share of the layers"),
        ({"kept_layers": "3/2"}, "sampler.kept_layers is '3/2'; expected a share above 0"),
        ({"kept_layers": "0,3"}, "sampler.kept_layers is '0,3'; expected layers from 0 to 2"),
        ({"drafter": "early_exit", "exit_layer": 4}, "sampler.exit_layer is 4; expected at most 3"),
        ({"drafter": "early_exit", "exit_layer": 0}, "sampler.exit_layer is 0; expected an"),
    ],
)
def test_plans_that_no_model_has_are_named(params, words):
    spec = {"name": "layer_skip", **params}
    with pytest.raises(GenError) as caught:
        run(resolve_sampler(spec)[0])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_layers_is_named(monkeypatch):
    from tabular import TabularCausal

    monkeypatch.delattr(TabularCausal, "with_layers")
    with pytest.raises(GenError, match="needs a model whose layers can be left out"):
        run(resolve_sampler("layer_skip")[0])
