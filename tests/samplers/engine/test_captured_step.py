"""Whole steps that are recorded once and replayed decode what steps without a record do.

Tensors say that they lie on an accelerator (``host_waits``), so a step takes the ways that it takes
there.
"""

from __future__ import annotations

import pytest
import torch
from ragged_prompts import T, V, decode_ragged
from recording import recorded
from small_llama import small_llama

from gen.bench.estimate.host_waits import HostWaits
from gen.core.registry import registry
from gen.core.token_space import TokenSpace
from gen.models.adapters.captured import captured_forward
from gen.models.adapters.language_models import CausalLM
from gen.samplers.causal import autoregressive

JACOBI = {"name": "speculative_jacobi", "window": 4}
STEPS = ["autoregressive", "jacobi", "sjd", {"name": "sjd_vp", "window": 4}]
STEPS += [JACOBI | {"coupling": c} for c in registry.table("coupling")]
STEPS += [
    JACOBI | {"coupling": "maximal", "init": name}
    for name, init in registry.table("initialiser").items()
    if init.guesses and name != "uniform"
]
TABLES = ["prompt_lookup", "suffix", "token_recycling", "aded", "stand"]
STAND = {"name": "speculative", "drafter": "stand"}
TREES = [
    STAND | {"drafter": "input_copy", "verifier": "follow"},
    *TABLES,
    STAND | {"verifier": "token", "num_speculative_tokens": 3},
    STAND | {"verifier": "block", "num_speculative_tokens": 3},
    STAND | {"shape": "branching", "branching": "2-2", "verifier": "recursive"},
    STAND | {"shape": "branching", "branching": "2-1", "verifier": "traversal"},
    STAND
    | {"shape": "branching", "branching": "3-1", "draws": "top_and_random"}
    | {"verifier": "recursive"},
    STAND | {"shape": "optimal", "nodes": 5, "tree_depth": 3, "verifier": "traversal"},
    STAND | {"shape": "paths", "paths": 2, "path_length": 2, "trunk": 1, "verifier": "k_seq"},
    STAND | {"shape": "best_first", "nodes": 5, "tree_depth": 3, "verifier": "recursive"},
    STAND | {"shape": "beam", "beam_width": 2, "tree_depth": 3, "nodes": 5, "verifier": "follow"},
    STAND
    | {"shape": "stochastic_beam", "beam_width": 2, "tree_depth": 2}
    | {"verifier": "recursive"},
    STAND | {"verifier": "token", "num_speculative_tokens": 3, "draft_vocab": 6},
]


@pytest.fixture(scope="module")
def net():
    return small_llama(V, layers=2)


def decode(net, spec, rows: int = 5, **more):
    """Decode as usual, and from recorded steps: both outputs, and the recorder."""
    want, meter = decode_ragged(CausalLM(net), spec, rows, **more), HostWaits()
    adapter = CausalLM(net)
    captured = captured_forward(adapter, recorded(meter))
    with meter:
        got = decode_ragged(adapter, spec, rows, **more)
    return want, got, captured.recorder


QUICK = ["autoregressive", "sjd", JACOBI | {"coupling": "maximal"}, "prompt_lookup", "suffix"]


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=str(spec), marks=[] if spec in QUICK else pytest.mark.slow)
        for spec in [*STEPS, *TREES]
    ],
)
def test_steps_are_recorded_once_and_decode_the_same_tokens(net, spec):
    want, got, recorder = decode(net, spec)
    assert torch.equal(got.tokens, want.tokens)
    assert [s.nfe for s in got.stats] == [s.nfe for s in want.stats]
    assert not recorder.reads
    # all steps but the first, which computes prompts; its pass over a tree is captured by itself
    most, first = max(s.nfe for s in got.stats), spec in TREES and spec != "prompt_lookup"
    assert recorder.replays - first in (most - 1, most - 2)
    assert recorder.traces - first <= 3  # all rows, a half, a quarter


@pytest.mark.parametrize("init", ["uniform", "repeat"])
def test_positions_may_differ_in_the_tokens_that_they_allow(net, init):
    """Rows that are over wait behind the last position, of which there is nothing to look up."""
    legal = torch.arange(T)[:, None] % 3 != torch.arange(V) % 3
    spec = JACOBI | {"coupling": "maximal", "init": init}
    want, got, recorder = decode(net, spec, space=TokenSpace((T,), V, legal))
    assert torch.equal(got.tokens, want.tokens) and recorder.replays > 2
    assert legal[torch.arange(T), got.tokens].all() and len({s.nfe for s in got.stats}) > 1


def test_control_a_step_that_reads_a_value_is_caught(net, monkeypatch):
    verify = autoregressive._NoDrafts.verify

    def reads(self, step, draft, output):
        step.round.add_(output.logprobs.argmax().item() * 0)
        return verify(self, step, draft, output)

    monkeypatch.setattr(autoregressive._NoDrafts, "verify", reads)
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        decode(net, "autoregressive")


def test_control_a_step_that_freezes_a_value_decodes_other_tokens(net, monkeypatch):
    verify = autoregressive._NoDrafts.verify

    def frozen(self, step, draft, output):
        first = int(step.start.numpy()[0])  # which a trace does not notice
        output.logprobs[..., first % V] = -torch.inf
        return verify(self, step, draft, output)

    monkeypatch.setattr(autoregressive._NoDrafts, "verify", frozen)
    want, got, recorder = decode(net, "autoregressive")
    assert recorder.reads and not torch.equal(got.tokens, want.tokens)


def test_control_a_drafter_that_reads_the_hosts_numbers_is_refused(net, monkeypatch):
    verify = autoregressive._NoDrafts.verify

    def reads(self, step, draft, output):
        assert step.starts.min() >= 0
        return verify(self, step, draft, output)

    monkeypatch.setattr(autoregressive._NoDrafts, "verify", reads)
    with pytest.raises(AttributeError, match="NoneType"):
        decode(net, "autoregressive")
