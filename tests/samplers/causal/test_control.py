"""Sampling parameters that look back are part of the distribution: penalties, n-grams, bad words,
logit bias and logits processors, by enumeration of every outcome of the draws.

The controls break one part each and must miss by more than 1e-3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from constrained import exact_length
from constraint_bench import CONTEXTS, COUPLINGS, EXACT, WRONG, autoregressive, jacobi, speculative
from controlled import (
    CASES,
    COUNTED,
    END,
    LENGTH,
    SHORT,
    controlled_error,
    favour,
    said,
)
from small_llama import small_llama
from tabular import TabularCausal, TabularMasked, causal_target, masked_target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.models.targets.past import Past

PLAIN = SamplingParams()
COUNTS = replace(COUNTED, bad_words=())
TINY = said(exact_length(3, 3))


# --- the distribution


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(2)
def test_distribution_of_autoregression(case):
    assert controlled_error(autoregressive(), END, CASES[case]) < EXACT


def test_distribution_of_autoregression_under_a_constraint():
    assert controlled_error(autoregressive(), LENGTH, COUNTS) < EXACT


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_distribution_of_jacobi_for_every_coupling(coupling):
    sampler = jacobi(coupling=coupling, window=3)
    assert controlled_error(sampler, SHORT, COUNTED) < EXACT
    assert controlled_error(sampler, TINY, COUNTS) < EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(3)
def test_distribution_of_jacobi_for_every_parameter(case):
    assert controlled_error(jacobi(window=3), SHORT, CASES[case]) < EXACT


@pytest.mark.parametrize("told", [True, False], ids=["drafts are controlled", "drafts are not"])
@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.thinned(2)
def test_distribution_of_speculative_chains(verifier, told):
    sampler = speculative(verifier=verifier, num_speculative_tokens=2)
    for space, sampling in ((SHORT, COUNTED), (TINY, COUNTS)):
        assert controlled_error(sampler, space, sampling, None if told else PLAIN) < EXACT


def tree_cases():
    for name, verifier in registry.table("verifier").items():
        if verifier.judges_trees and verifier.guarantee == "same_distribution":
            for shape, params in SHAPES.items():
                for draws in registry.get("shape", shape).takes:
                    if draws in verifier.draws:
                        params = {"verifier": name, "shape": shape, "draws": draws, **params}
                        yield pytest.param(params, id=f"{name}-{shape}-{draws}")


SHAPES = {
    "branching": {"branching": "2-1"},
    "paths": {"paths": 2, "path_length": 2},
    "best_first": {"nodes": 3, "tree_depth": 2},
}


@pytest.mark.parametrize("params", list(tree_cases()))
@pytest.mark.thinned(8)
def test_distribution_of_speculative_trees(params):
    assert controlled_error(speculative(**params), SHORT, COUNTED) < EXACT


# --- controls of the distribution


def test_control_only_the_drafts_are_controlled(monkeypatch):
    """Parameters that the target does not know."""
    target = CausalTarget._look_back

    def of_drafts(self, logits, positions):
        return target(self, logits, positions) if self.model.seed else logits

    monkeypatch.setattr(CausalTarget, "_look_back", of_drafts)
    assert controlled_error(speculative(num_speculative_tokens=2), SHORT, COUNTED) > WRONG


def not_rolled_back(past, logits, history, positions, items, _true=Past.__call__):
    """Counts that keep the tokens of rejected drafts."""
    none = torch.zeros(len(past.prompts), dtype=torch.long)
    known = past.__dict__.setdefault("furthest", none)
    late = torch.maximum(positions, known[items][:, None])
    known[items] = torch.maximum(known[items], positions.amax(1))
    return _true(past, logits, history, late, items)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_control_counts_that_are_not_rolled_back(monkeypatch, coupling):
    monkeypatch.setattr(Past, "__call__", not_rolled_back)
    sampling = SamplingParams(frequency_penalty=0.9)
    assert controlled_error(jacobi(coupling=coupling, window=3), SHORT, sampling) > WRONG
    assert controlled_error(autoregressive(), SHORT, sampling) < EXACT  # it drafts nothing


def test_control_trees_whose_branches_share_a_history(monkeypatch):
    def of_root(self, logits, positions):
        branches, self._branches = self._branches, None
        out = look_back(self, logits, positions)
        self._branches = branches
        return out

    look_back = CausalTarget._look_back
    monkeypatch.setattr(CausalTarget, "_look_back", of_root)
    sampler = speculative(shape="paths", paths=2, path_length=2, verifier="recursive")
    assert controlled_error(sampler, SHORT, COUNTED) > WRONG


# --- rows


LONG = said(TokenSpace.codes((10,), 4, 24))
SAMPLERS = {
    "autoregressive": autoregressive(),
    "jacobi": jacobi(window=4),
    "chain": speculative(num_speculative_tokens=3),
    "tree": speculative(shape="paths", paths=2, path_length=3, verifier="recursive"),
}


def decode(sampler, rows, sampling, at_most=None, nets=None):
    made = (TabularCausal(LONG.vocab_size, seed, low=0.0, spread=1.5) for seed in (0, 5))
    model, small = made if nets is None else nets
    context = [r % CONTEXTS for r in rows]
    target = causal_target(model, LONG, sampling, context)
    draft = causal_target(small, LONG, sampling, context) if sampler.drafted else None
    for one in (target, draft):
        if at_most is not None and one is not None:
            one.at_most(at_most)
    rng = CounterRNG([7919 * r + 5 for r in rows])
    return sampler(target, rng, draft=draft).tokens


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.thinned(2)
def test_a_row_is_the_same_alone_and_in_a_batch(name):
    rows, sampling = list(range(4)), CASES["all"]
    batch = decode(SAMPLERS[name], rows, sampling)
    alone = torch.cat([decode(SAMPLERS[name], [r], sampling) for r in rows])
    assert torch.equal(batch, alone)
    assert not torch.equal(batch, decode(SAMPLERS[name], rows, PLAIN))


@pytest.mark.parametrize("name", ["autoregressive", "jacobi", "chain"])
@pytest.mark.thinned(2)
def test_an_item_that_takes_the_row_of_another_looks_back_at_its_own_tokens(name):
    nets = [CausalLM(small_llama(24, seed).double()) for seed in (0, 1)]
    sampling = replace(CASES["all"], guidance_scale=1.0)
    batch = decode(SAMPLERS[name], range(7), sampling, nets=nets)
    assert torch.equal(batch, decode(SAMPLERS[name], range(7), sampling, 3, nets))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(4)
def test_greedy_samplers_agree_under_every_parameter(case):
    # more 2-grams than these would leave no token of this language
    length = 3 * (case == "ngrams")
    greedy = replace(CASES[case], temperature=0.0, top_k=0, no_repeat_ngram_size=length)
    expected = decode(autoregressive(), range(3), greedy)
    for name, sampler in SAMPLERS.items():
        assert torch.equal(decode(sampler, range(3), greedy), expected), name
    beam = registry.get("sampler", "beam_search")(num_beams=1)
    assert torch.equal(decode(beam, range(3), greedy), expected)


def test_logits_processors_see_rows_without_padding():
    seen = []

    def watch(input_ids, scores):
        seen.append((input_ids.clone(), scores.shape))
        return scores

    decode(autoregressive(), [0, 1, 2], SamplingParams(logits_processor=watch))
    assert all(bool((ids >= 0).all()) and len(ids) == shape[0] for ids, shape in seen)
    # prompts of 0, 2 and 1 tokens
    assert sorted(ids.shape[1] for ids, _ in seen[:3]) == [0, 1, 2]
    assert [ids.tolist() for ids, _ in seen[:3] if ids.shape[1] == 2] == [[[0, 1]]]
    assert {shape[1] for _, shape in seen} == {LONG.vocab_size}


# --- refusals


def test_targets_refuse_what_they_cannot_honour():
    space = said(TokenSpace.codes((4,), 3, 4, mask_token_id=3))
    masked = TabularMasked(4, seed=0)
    for sampling, name in (
        (SamplingParams(repetition_penalty=1.2), "repetition_penalty"),
        (SamplingParams(no_repeat_ngram_size=2), "no_repeat_ngram_size"),
        (SamplingParams(bad_words=[[0, 1]]), "bad_words"),
        (SamplingParams(logits_processor=favour), "logits_processor"),
    ):
        with pytest.raises(GenError, match=f"sampling.{name} reads the tokens before"):
            masked_target(masked, space, sampling, [0, 0])
    causal = TabularCausal(4)
    with pytest.raises(GenError, match="stop came to a target"):
        causal_target(causal, space, SamplingParams(stop="x"), [0])
    with pytest.raises(GenError, match="names token 9; expected an id below 4"):
        causal_target(causal, space, SamplingParams(logit_bias={9: 1.0}), [0])
    with pytest.raises(GenError, match="by the text 'x'"):
        causal_target(causal, space, SamplingParams(bad_words="x"), [0])
    superposed = causal_target(causal, space, SamplingParams(presence_penalty=1), [0])
    with pytest.raises(GenError, match=r"m came with sampling.presence_penalty"):
        superposed.require_superposition("m")


def test_the_bias_of_masked_targets_is_part_of_every_position():
    space = said(TokenSpace.codes((4,), 3, 4, mask_token_id=3))
    masked, canvas = TabularMasked(4, seed=0, low=0.0), torch.full((2, 4), 3)
    plain = masked_target(masked, space, PLAIN, [0, 0]).predict(canvas)
    biased = SamplingParams(logit_bias={0: 1.5}, bad_words=[[2]])
    found = masked_target(masked, space, biased, [0, 0]).predict(canvas)
    for before, after in ((plain.logprobs, found.logprobs), (plain.raw(), found.raw())):
        shifted = before + torch.tensor([1.5, 0.0, -torch.inf])
        assert torch.allclose(after, shifted.log_softmax(-1), atol=1e-12)


def test_a_position_that_is_left_without_a_token_is_an_error():
    with pytest.raises(GenError, match="no_repeat_ngram_size"):
        decode(autoregressive(), [0, 1], SamplingParams(no_repeat_ngram_size=1))


@pytest.mark.parametrize("wrong", [lambda i, s: None, lambda i, s: s[:, :2], lambda i, s: s.long()])
def test_logits_processors_return_scores(wrong):
    with pytest.raises(GenError, match=r"logits processor .*<lambda> returned .*expected floats"):
        decode(autoregressive(), [0], SamplingParams(logits_processor=wrong))
