"""Returned log-probabilities are those of the finished text under the model, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_llama import small_llama

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.logprobs import LogprobRecorder

V, T, N, TOP = 24, 11, 7, 3
NETS = small_llama(V), small_llama(V, 1)
SPECS = {
    "autoregressive": "autoregressive",
    "jacobi": {"name": "speculative_jacobi", "window": 4},
    "maximal": {"name": "speculative_jacobi", "window": 5, "coupling": "maximal"},
    "chain": {"name": "speculative", "num_speculative_tokens": 3},
    "block": {"name": "speculative", "num_speculative_tokens": 3, "verifier": "block"},
    "tree": {
        "name": "speculative",
        "shape": "best_first",
        "verifier": "traversal",
        "nodes": 6,
        "tree_depth": 3,
    },
    "paths": {"name": "speculative", "shape": "paths", "verifier": "k_seq", "path_length": 2},
    "lookup": {"name": "speculative", "drafter": "prompt_lookup"},
    "relaxed": "typical",
    "momentum": "momentum_decoding",
}


class NeverTwice:
    """No token repeats its predecessor."""

    vocab_size = V

    def legal(self, history, positions):
        before = history.gather(1, (positions - 1).clamp_min(0))
        out = torch.ones(*positions.shape, self.vocab_size, dtype=torch.bool)
        return out.scatter(-1, before[..., None], False) | (positions == 0)[..., None]


def make_target(net, sampling: SamplingParams, constraint=None) -> CausalTarget:
    g = torch.Generator().manual_seed(3)
    prompt, uncond = (torch.randint(16, V, (N, 5), generator=g) for _ in range(2))
    lengths = torch.tensor([3, 5, 4] * N)[:N]
    legal = torch.zeros(T, V, dtype=torch.bool)
    legal[:, :20] = True
    space = TokenSpace((T,), V, legal, eos_token_id=15, constraint=constraint)
    branch = (uncond, lengths, lengths.flip(0)) if sampling.guided else (None, lengths, None)
    return CausalTarget(CausalLM(net), prompt, space, sampling, *branch)


def decode(name, sampling: dict, rows: int | None = None, constraint=None):
    sampler, params = resolve_sampler(SPECS[name], {"logprobs": TOP, **sampling})
    target = make_target(NETS[0], params, constraint)
    draft = make_target(NETS[1], params, constraint) if sampler.drafted else None
    for part in (target, draft):
        if part is not None and rows:
            part.at_most(rows)
    return target, sampler(target, CounterRNG(range(N)), draft=draft)


def scored(target: CausalTarget, tokens: torch.Tensor, scale: float = 1.0, constraint=None):
    """Teacher-forced pass of the network itself over prompt and text: [T, V] of every item."""
    found = []
    for item, text in enumerate(tokens):
        branches = []
        for h in range(target.branches):
            n = item + h * N
            before = target.prompts.all_tokens[n, : target.prompts.all_lengths[n]]
            ids = torch.cat([before, text])[None]
            with torch.no_grad():
                branches.append(NETS[0](ids).logits[0, len(before) - 1 : -1, :20])
        z = branches[0] if len(branches) == 1 else branches[1] + scale * (branches[0] - branches[1])
        if constraint is not None:
            legal = constraint.legal(text[None], torch.arange(T)[None])[0, :, :20]
            z = z.masked_fill(~legal, -torch.inf)
        found.append(z.log_softmax(-1))
    return torch.stack(found)


def furthest(out, logp: torch.Tensor, tokens: torch.Tensor, shift: int = 0) -> float:
    """Largest difference between returned log-probabilities and those of column k + shift."""
    worst = 0.0
    for item, row in enumerate(out.logprobs):
        assert [t.token_id for t in row] == tokens[item, : len(row)].tolist()
        assert len(row) == out.stats[item].tokens
        for k, token in enumerate(row[: len(row) - abs(shift)]):
            want = logp[item, k + shift]
            best = want.topk(TOP)
            worst = max(worst, abs(token.logprob - float(want[token.token_id])))
            if not shift:
                assert [i for i, _ in token.top] == best.indices.tolist()
            values = torch.tensor([x for _, x in token.top], dtype=torch.float64)
            worst = max(worst, float((values - best.values).abs().max()))
    return worst


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.thinned(6)
def test_logprobs_are_those_of_a_forward_pass_over_the_finished_text(name):
    params = {"temperature": 0.7, "top_k": 6}
    for rows in (None, 3):
        target, out = decode(name, params, rows)
        logp = scored(target, out.tokens)
        assert furthest(out, logp, out.tokens) < 1e-9
        # control: another column is another distribution
        assert furthest(out, logp, out.tokens, shift=1) > 0.1
    lengths = {len(row) for row in out.logprobs}
    assert name == "momentum" or len(lengths) > 1  # rows end at different positions


@pytest.mark.parametrize("name", ["autoregressive", "jacobi", "tree"])
def test_logprobs_have_guidance_and_the_constraint_but_no_temperature(name):
    rule = NeverTwice()
    target, out = decode(name, {"guidance_scale": 2.0, "temperature": 0.5}, 3, rule)
    logp = scored(target, out.tokens, 2.0, rule)
    assert furthest(out, logp, out.tokens) < 1e-9
    without = scored(target, out.tokens, 2.0)
    with pytest.raises(AssertionError):  # control: the constraint changes them
        assert furthest(out, without, out.tokens) < 1e-9


@pytest.mark.parametrize("name", ["jacobi", "chain", "tree"])
def test_asking_changes_neither_tokens_nor_the_number_of_forward_passes(name):
    _, out = decode(name, {})
    _, plain = decode(name, {"logprobs": None})
    assert torch.equal(out.tokens, plain.tokens) and plain.logprobs is None
    assert [s.nfe for s in out.stats] == [s.nfe for s in plain.stats]


def test_greedy_decoding_returns_the_distribution_before_its_argmax():
    _, out = decode("autoregressive", {"temperature": 0.0, "logprobs": 0})
    chosen = np.array([t.logprob for row in out.logprobs for t in row])
    assert (chosen < 0).all() and chosen.std() > 0.1
    assert all(t.top == () for row in out.logprobs for t in row)


def test_a_column_that_is_off_by_one_fails(monkeypatch):
    add = LogprobRecorder.add

    def shifted(self, items, num_committed, tokens, path, output):
        raw = output.raw
        moved = replace(output, raw=lambda: raw().roll(1, dims=1))
        add(self, items, num_committed, tokens, path, moved)

    monkeypatch.setattr(LogprobRecorder, "add", shifted)
    for name in ("jacobi", "chain", "tree"):
        target, out = decode(name, {})
        logp = scored(target, out.tokens)
        with pytest.raises(AssertionError):
            assert furthest(out, logp, out.tokens) < 1e-9


@pytest.mark.parametrize("name", ["beam", "maskgit", "continuous_jacobi", "superposed_decoding"])
def test_samplers_without_a_next_token_refuse_by_name(name):
    with pytest.raises(GenError, match="sampling.logprobs is 2"):
        resolve_sampler(name, {"logprobs": 2})


@pytest.mark.parametrize("name", ["autoregressive", "jacobi", "tree"])
def test_logprobs_have_bias_and_penalties(name):
    control = {"logit_bias": {7: 1.5}, "frequency_penalty": 0.8, "temperature": 0.5}
    target, out = decode(name, control, 3)
    before = torch.nn.functional.one_hot(out.tokens, V)[..., :20].double().cumsum(1).roll(1, dims=1)
    before[:, 0] = 0
    bias = torch.zeros(20, dtype=torch.float64)
    bias[7] = 1.5
    plain = scored(target, out.tokens)
    logp = (plain + bias - 0.8 * before).log_softmax(-1)
    assert furthest(out, logp, out.tokens) < 1e-9
    with pytest.raises(AssertionError):  # control: the penalty changes them
        assert furthest(out, (plain + bias).log_softmax(-1), out.tokens) < 1e-9
