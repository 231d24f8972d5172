"""Forward passes that are captured once and replayed decode what passes without capture do."""

from __future__ import annotations

import gc

import pytest
import torch
from families import WRITERS
from peft_folders import loaded, write_adapters
from ragged_prompts import T, V, decode_ragged
from recording import TraceRecorder, recorded
from small_llama import small_llama

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.token_space import TokenSpace
from gen.models.adapters.captured import SPARE, Captured, captured_forward
from gen.models.adapters.graphs import FixedSlots
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.pipeline.passes import one_of
from gen.samplers.engine.captured_step import StepGraphs
from gen.samplers.masked import loop as masked_loop

ROWS = 5
JACOBI = {"name": "speculative_jacobi", "window": 6}
MASKED = ["maskgit", "halton", "freedave", "fast_dllm"]
QUICK = ["autoregressive", JACOBI, "sjd_pac", "suffix", "token_recycling"]  # the last three: trees
GROWING = ["suffix", "token_recycling"]  # whose trees grow, and their memory once


def decode(net, spec, captured: Captured | None, rows: int = ROWS, seed: int = 0):
    adapter = CausalLM(net)
    if captured is not None:
        captured_forward(adapter, captured)
    return decode_ragged(adapter, spec, rows, seed)


@pytest.fixture(autouse=True)
def by_themselves(monkeypatch):
    """Captured passes without captured steps, which have tests of their own."""
    monkeypatch.setattr(StepGraphs, "of", lambda run: None)
    monkeypatch.setattr(masked_loop, "recorded_steps", lambda run: None)


@pytest.fixture(scope="module")
def net():
    return small_llama(V, layers=2)


@pytest.mark.parametrize("spec", QUICK, ids=str)
def test_replayed_passes_decode_what_passes_do(net, spec):
    captured = recorded()
    want, traces = decode(net, spec, None), []
    for _ in range(3):
        got = decode(net, spec, captured)
        assert torch.equal(got.tokens, want.tokens)
        assert [s.nfe for s in got.stats] == [s.nfe for s in want.stats]
        traces.append(captured.recorder.traces)
    assert 0 < traces[1] == traces[2] < captured.recorder.replays / 3  # nothing is captured again
    assert traces[0] == traces[1] or spec in GROWING
    assert torch.equal(
        decode(net, spec, captured, seed=1).tokens, decode(net, spec, None, seed=1).tokens
    )


@pytest.mark.parametrize("spec", MASKED, ids=str)
def test_replayed_passes_over_a_canvas_decode_what_passes_do(spec):
    prompts, how = ["sort 3 1 2 =", "2+3="], {"seed": 0, "max_new_tokens": 8}
    want, pipe = gen.load("text", device="cpu", dtype="float64")(prompts, spec, **how), replaying()
    for _ in range(2):
        got = pipe(prompts, spec, **how)
        assert torch.equal(got.tokens, want.tokens)
        assert [s.nfe for s in got.stats] == [s.nfe for s in want.stats]
    recorder = pipe._captured["text-masked"].recorder
    assert 0 < recorder.traces < recorder.replays


# every pass of these returns hidden states or reads mixtures of tokens
WITHOUT = {"superposed_decoding", "superposed", "eagle"}
# has layers of the drafter's as well; has states of a canvas adjusted
OTHER_PASSES = {"flexdraft", "adjust"}


def names_of_samplers() -> list[str]:
    found = []
    for name in [*registry.table("sampler"), *registry.table("preset")]:
        sampler = resolve_sampler(name)[0]
        if sampler.protocol in ("causal", "masked", "blocks") and "codes" in sampler.kinds:
            found += [] if sampler.wraps else [name]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_samplers())
def test_every_sampler_decodes_the_same_from_replayed_passes(name):
    """Of the built-in text model and its draft model, where the sampler has what it needs."""
    plain = gen.load("text", device="cpu", dtype="float64")
    try:
        plain.model_name(name)
        plain.draft_names(name)
        want = plain(["sort 3 1 2 =", "2+3="], name, seed=0, max_new_tokens=8)
    except GenError as error:  # no such model or no weights, as without capture
        with pytest.raises(GenError) as same:
            replaying()(["sort 3 1 2 =", "2+3="], name, seed=0, max_new_tokens=8)
        assert str(same.value) == str(error)
        return
    pipe = replaying()
    got = pipe(["sort 3 1 2 =", "2+3="], name, seed=0, max_new_tokens=8)
    assert torch.equal(got.tokens, want.tokens)
    assert [s.nfe for s in got.stats] == [s.nfe for s in want.stats]
    used = pipe._captured.values()
    if name in OTHER_PASSES:
        assert not sum(c.recorder.replays for c in used)
    elif name in WITHOUT:
        assert sum(c.without for c in used) and not sum(c.recorder.replays for c in used)
    else:
        assert sum(c.recorder.replays for c in used)


def replaying():
    """A pipeline whose passes are replayed from traces."""
    pipe = gen.load("text", device="cpu", dtype="float64")
    pipe.cuda_graphs = True  # which a CPU has not
    names = (*pipe.modality.models.values(),)
    pipe._captured.update({name: recorded() for name in names})
    return pipe


def test_rows_that_finish_halve_the_passes_and_rows_that_join_use_them_again(net):
    """One captured pass for each number of columns and each half of the rows."""
    captured = recorded()
    decode(net, "autoregressive", captured)
    assert captured.recorder.traces == 1  # rows end together
    decode(net, JACOBI, captured)
    (memory,) = captured._spare
    heights = {key[2][0][0] for key in memory.graphs}
    assert heights <= {2 * ROWS, ROWS, ROWS // 2} and 2 * ROWS in heights


def test_memory_of_a_cache_that_is_gone_is_lent_again_and_little_is_kept(net):
    captured = recorded()
    for rows in (5, 4, 3, 2):
        decode(net, "autoregressive", captured, rows)
    gc.collect()
    assert len(captured._spare) == SPARE
    kept = captured._spare[-1]
    decode(net, "autoregressive", captured, 2)
    gc.collect()
    assert kept in captured._spare and len(kept.graphs) == 1


def test_what_a_call_left_in_memory_reaches_no_other_call(net):
    """Not even numbers that are none."""
    captured = recorded()
    want = decode(net, JACOBI, captured)
    (memory,) = captured._spare
    for pair in memory.layers.values():
        for x in pair:
            x.fill_(torch.nan)
    assert torch.equal(decode(net, JACOBI, captured).tokens, want.tokens)


class Reads(CausalLM):
    """Adapter whose network reads a value on the host."""

    reads = True

    def network(self, inputs, positions, mask, cache):
        shift = int(positions.max()) if isinstance(cache, FixedSlots) else 0
        return super().network(inputs, positions, mask, cache) + shift * 0


class Freezes(CausalLM):
    """Adapter whose network depends on a number that Python keeps."""

    calls = 0

    def network(self, inputs, positions, mask, cache):
        type(self).calls += 1
        out = super().network(inputs, positions, mask, cache)
        return out.roll(type(self).calls, -1)


def generate(adapter, captured):
    if captured is not None:
        captured_forward(adapter, captured)
    sampler, sampling = resolve_sampler("autoregressive", {"temperature": 0.0})
    target = CausalTarget(adapter, torch.arange(4)[None], TokenSpace.codes((T,), 16, V), sampling)
    return sampler(target, CounterRNG([0])).tokens


def test_control_a_network_that_reads_a_value_is_caught(net):
    assert generate(Reads(net), None).shape == (1, T)
    with pytest.raises(RuntimeError, match="value out of a tracing tensor|data-dependent|item"):
        generate(Reads(net), recorded())


def test_control_a_network_that_depends_on_python_gives_other_tokens(net):
    want, Freezes.calls = generate(Freezes(net), None), 0
    assert not torch.equal(generate(Freezes(net), recorded()), want)


def test_passes_that_run_without_a_graph_are_said_once(caplog):
    pipe = replaying()
    with caplog.at_level("WARNING", logger="gen"):
        pipe("2+3=", "superposed", max_new_tokens=6)
        pipe("2+3=", "superposed", max_new_tokens=6)
    assert [r.message for r in caplog.records if "without a CUDA graph" in r.message] == [
        "some passes of this sampler run without a CUDA graph: they return hidden states, or read"
        " mixtures of tokens"
    ]
    caplog.clear()
    with caplog.at_level("WARNING", logger="gen"):
        pipe("2+3=", "suffix", max_new_tokens=6)
    assert "graph" not in caplog.text


def test_what_is_not_captured_is_refused():
    with pytest.raises(GenError, match="cuda_graphs is True, and the models are on 'cpu'"):
        gen.load("text", device="cpu", cuda_graphs=True)
    with pytest.raises(GenError, match="cuda_graphs is 'yes'; expected true or false"):
        gen.load("text", cuda_graphs="yes")
    with pytest.raises(GenError, match="compile and cuda_graphs are given; expected one"):
        one_of(torch.device("cuda"), None, None, True, False, True)
    pipe = gen.load("image", device="cpu")
    pipe.cuda_graphs = True
    with pytest.raises(GenError, match="cuda_graphs does not support .* as CausalLatentLM"):
        pipe("a red circle", "continuous_jacobi")
    adapter = CausalLM(small_llama(V, layers=1))
    adapter.takes_block_masks = True
    with pytest.raises(GenError, match="cuda_graphs does not support attn_implementation"):
        captured_forward(adapter, Captured(TraceRecorder()))


def test_adapters_by_name_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    case = WRITERS["causal_lm"](tmp_path / "model")
    folders = write_adapters(case, tmp_path, a=3, b=5)
    pipe = loaded(case, adapters=folders)
    pipe.cuda_graphs = True
    with pytest.raises(GenError, match="cuda_graphs does not support adapters by name"):
        pipe(case.prompts[0], "autoregressive")
