"""``compile``: the forward through ``torch.compile`` gives what it gives without, in few graphs for
all calls of a decoding; and jobs that say it."""

from __future__ import annotations

import pytest
import torch
from compiling import masked_rows, needs_compiler
from ragged_prompts import T, V, decode_ragged
from small_llama import small_llama
from toyjob import Pipe, job, steady

from gen.config.entries import fingerprint
from gen.config.job import load_config, make_job
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.jobs.run import run_job
from gen.jobs.worker import Pipes
from gen.models.adapters import graphs
from gen.models.adapters.graphs import compiled, compiled_forward
from gen.models.adapters.language_models import (
    BlockLM,
    CausalLatentLM,
    CausalLM,
)
from gen.models.targets.causal import CausalTarget
from gen.pipeline import pipeline
from gen.pipeline.pipeline import load
from gen.store.ledger import read_rows

MASKED = ["halton", {"name": "fast_dllm", "cache": "dual"}]
# Tracing takes seconds: networks have one layer, and the forwards of these are those of the first.
JACOBI = {"name": "speculative_jacobi", "window": 4}
SPECS = [
    JACOBI,
    pytest.param("autoregressive", marks=pytest.mark.slow),
    pytest.param(
        {"name": "speculative_jacobi", "window": 6, "coupling": "maximal"}, marks=pytest.mark.slow
    ),
]


def decode(net, spec, backend: str | None, rows: int = 5):
    adapter = CausalLM(net)
    if backend:
        compiled_forward(adapter, backend)
    return decode_ragged(adapter, spec, rows)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_graph_of_a_forward_decodes_what_the_forward_does(spec):
    torch._dynamo.reset()
    net = small_llama(V, layers=1)
    want, got = decode(net, spec, None), decode(net, spec, "eager")
    assert torch.equal(got.tokens, want.tokens) and [s.nfe for s in got.stats] == [
        s.nfe for s in want.stats
    ]


def test_few_graphs_serve_all_widths_and_rows_and_later_targets_too():
    """Each graph more is a compilation of its own, up to minutes of waiting in the midst of
    decoding."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decode(small_llama(V, layers=1), JACOBI, "eager")
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    decode(small_llama(V, 1, layers=1), JACOBI, "eager", rows=4)
    assert 1 <= first <= 3 and torch._dynamo.utils.counters["stats"]["unique_graphs"] <= first + 1


@pytest.mark.parametrize("spec", MASKED, ids=str)
@pytest.mark.slow
def test_the_graph_of_a_masked_forward_decodes_what_the_forward_does(spec):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, sampler = small_llama(V, layers=1), resolve_sampler(spec)[0]
    want, got = (
        sampler(masked_rows(net, backend, T, guided=True), CounterRNG(range(3)))
        for backend in (None, "eager")
    )
    assert (
        torch.equal(got.tokens, want.tokens)
        and torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    )


def test_the_graph_of_a_block_forward_gives_its_logits():
    torch._dynamo.reset()
    net = small_llama(V, layers=1)
    net.config.block_length = 4
    plain, fast = BlockLM(net), BlockLM(net)
    compiled_forward(fast, "eager")
    caches = plain.new_cache(12), fast.new_cache(12)
    for first in (0, 4, 8):
        at = torch.arange(first, first + 4).expand(2, -1)
        ids, last = (at + torch.tensor([[0], [7]])) % V, torch.full_like(at, first + 3)
        assert torch.allclose(
            plain.forward(ids, at, last, caches[0]),
            fast.forward(ids, at, last, caches[1]),
            rtol=0,
            atol=1e-12,
        )


def test_control_a_masked_graph_that_sees_padding_is_found():
    net, canvas = small_llama(V, layers=1), torch.full((3, T), V - 1)
    broken = masked_rows(net, None, T, guided=True)
    whole = broken.model.canvas_network
    broken.model.canvas_network = lambda inputs, at, mask, tables, keep: whole(
        inputs, at, None, tables, keep
    )
    assert not torch.allclose(
        broken.predict(canvas).logprobs,
        masked_rows(net, None, T, guided=True).predict(canvas).logprobs,
        atol=1e-3,
    )


def graphs_of(models: int) -> int:
    """Graphs of models that have ever more layers, each with one row and with three."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layers in range(1, models + 1):
        net = small_llama(V, layers=1)
        net.model.layers = torch.nn.ModuleList([net.model.layers[0]] * layers)
        net.config.num_hidden_layers = layers
        for rows in (1, 3):
            decode(net, JACOBI, "eager", rows)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_process_of_many_models_does_not_run_out_of_graphs(monkeypatch):
    """Each has graphs of its own; torch would stop at eight, as the control does at two."""
    assert graphs_of(5) > 8
    monkeypatch.setattr(graphs, "GRAPHS", 2)
    try:
        compiled.cache_clear()
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            graphs_of(2)
    finally:
        compiled.cache_clear()


@pytest.mark.slow
@needs_compiler
def test_compiled_kernels_give_the_logits_of_a_masked_model():
    net, canvas = small_llama(V, layers=1).float(), torch.full((3, T), V - 1)
    got, want = (
        masked_rows(net, backend, T, guided=True).predict(canvas).logprobs
        for backend in ("inductor", None)
    )
    assert torch.allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_compiled_kernels_decode_the_same_images():
    plain, fast = load("image", dtype="float64"), load("image", dtype="float64", compile=True)
    prompts = ["a small blue ring in the centre", "a red circle"]
    for spec in ("autoregressive", {"name": "speculative_jacobi", "window": 16}, "halton"):
        assert torch.equal(fast(prompts, spec).tokens, plain(prompts, spec).tokens)


@pytest.mark.slow
def test_control_a_graph_that_forgets_the_mask_is_found():
    torch._dynamo.reset()
    net = small_llama(V, layers=1)
    adapter = CausalLM(net)
    compiled_forward(adapter, "eager")
    run, calls = adapter.graphs.against_slots, []
    adapter.graphs.against_slots = lambda adapter, inputs, positions, mask, cache: (
        calls.append(1),
        run(adapter, inputs, positions, torch.zeros_like(mask), cache),
    )[1]
    space, prompt = TokenSpace.codes((T,), 16, V), torch.arange(8).view(2, 4)
    sampler = resolve_sampler(JACOBI)[0]
    broken = sampler(CausalTarget(adapter, prompt, space, SamplingParams()), CounterRNG([0, 1]))
    whole = sampler(
        CausalTarget(CausalLM(net), prompt, space, SamplingParams()), CounterRNG([0, 1])
    )
    assert calls and not torch.equal(broken.tokens, whole.tokens)


def test_what_is_not_compiled_is_refused():
    assert compiled("cpu", "eager") is compiled("cpu", "eager")
    latents = CausalLatentLM.__new__(CausalLatentLM)
    latents.model = torch.nn.Identity()
    with pytest.raises(GenError, match="not support Identity as CausalLatentLM; expected"):
        compiled_forward(latents)
    with pytest.raises(GenError, match="compile is 1; expected true or false"):
        load("text", compile=1)


def test_without_a_compiler_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(GenError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        compiled_forward(CausalLM(small_llama(V, layers=1)))
    compiled_forward(CausalLM(small_llama(V, layers=1)), "eager")  # control: this one needs none


# --- jobs


def loaded(monkeypatch) -> list[bool]:
    """What pipelines are told from now on, in a job of a toy."""
    told: list[bool] = []
    monkeypatch.setattr(
        pipeline,
        "load",
        lambda modality, *, model, device, dtype, compile: told.append(compile) or Pipe(),
    )
    return told


@pytest.mark.usefixtures("toy")
def test_a_job_that_goes_on_may_say_another_value(tmp_path, monkeypatch):
    told, stop = loaded(monkeypatch), iter([False, False, False, True])
    keys = {"batch_size": 1, "shard_items": 1}
    assert run_job(job(tmp_path, compile=True, **keys), stop=lambda: next(stop, True))["pending"]
    assert (
        load_config(tmp_path / "config.yaml").entries[0].compile
    )  # what workers of other processes read
    assert not run_job(job(tmp_path, **keys))["pending"] and told == [True, False]
    run_job(job(tmp_path / "whole", **keys))
    assert (
        steady(tmp_path) == steady(tmp_path / "whole") and "compile" not in read_rows(tmp_path)[0]
    )


@pytest.mark.usefixtures("toy")
def test_entries_that_say_it_have_pipelines_of_their_own(monkeypatch):
    told = loaded(monkeypatch)
    entries = job("o", jobs=[{"compile": True}, {"seed": 3}, {"seed": 4, "compile": True}]).entries
    pipes = Pipes()
    first, second, third = map(pipes.of, entries)
    assert told == [True, False] and first is third and first is not second


def test_a_deterministic_job_refuses_it():
    said = {"modality": "image", "prompts": ["a red circle"], "deterministic": True}
    with pytest.raises(
        GenError,
        match="compile of jobs.1 in here is true.*expected false, because deterministic is true",
    ):
        make_job({**said, "jobs": [{"seed": 1}, {"seed": 2, "compile": True}]}, where="here")
    plain = make_job({**said, "compile": False}, where="here")
    assert fingerprint(plain) == fingerprint(make_job(said, where="here"))
