"""``compile``: the causal forward through ``torch.compile`` gives what it gives without, in one graph that serves all calls of a decoding."""

from __future__ import annotations

import shutil

import pytest
import torch
from small_llama import small_llama
from transformers import MistralConfig, MistralForCausalLM

from gen.draws import CounterDraws
from gen.errors import GenError
from gen.law import Law
from gen.models.adapters import CausalLM, compiled_forward
from gen.models.lean import compiled
from gen.models.targets import CausalTarget
from gen.pipeline import load
from gen.sampling import resolve_sampler
from gen.types import TokenSpace

V, T = 24, 16
SPECS = ["autoregressive", {"name": "speculative_jacobi", "window": 4}, {"name": "speculative_jacobi", "window": 6, "coupling": "maximal"}]


def decode(net, spec, backend: str | None, rows: int = 5):
    sampler, law = resolve_sampler(spec, {"guidance_scale": 2.0})
    prompt = torch.arange(rows * 4).view(rows, 4) % V
    adapter = CausalLM(net)
    if backend:
        compiled_forward(adapter, backend)
    target = CausalTarget(adapter, prompt, TokenSpace.codes((T,), 16, V), law, prompt.flip(1), torch.tensor([2, 4, 3, 4, 4])[:rows],
                          torch.tensor([4, 4, 2, 4, 3])[:rows])
    return sampler(target, CounterDraws(range(rows)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_graph_of_a_forward_decodes_what_the_forward_does(spec):
    torch._dynamo.reset()
    net = small_llama(V)
    want, got = decode(net, spec, None), decode(net, spec, "eager")
    assert torch.equal(got.tokens, want.tokens) and [s.nfe for s in got.stats] == [s.nfe for s in want.stats]


def test_few_graphs_serve_all_widths_and_rows_and_later_targets_too():
    """Each graph more is a compilation of its own, up to minutes of waiting in the midst of decoding."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decode(small_llama(V), SPECS[1], "eager")
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    decode(small_llama(V, 1), SPECS[1], "eager", rows=4)
    assert 1 <= first <= 3 and torch._dynamo.utils.counters["stats"]["unique_graphs"] <= first + 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here, which torch.compile needs on a CPU")
def test_compiled_kernels_decode_the_same_pictures():
    plain, fast = load("image", dtype="float64"), load("image", dtype="float64", compile=True)
    prompts = ["a small blue ring in the centre", "a red circle"]
    for spec in ("autoregressive", {"name": "speculative_jacobi", "window": 16}):
        assert torch.equal(fast(prompts, spec).tokens, plain(prompts, spec).tokens)


def test_control_a_graph_that_forgets_the_mask_is_found():
    torch._dynamo.reset()
    net = small_llama(V)
    adapter = CausalLM(net)
    compiled_forward(adapter, "eager")
    run, calls = adapter._compiled, []
    adapter._compiled = lambda lean, tokens, positions, tables, keys, values, mask, keep: (
        calls.append(1), run(lean, tokens, positions, tables, keys, values, torch.zeros_like(mask), keep))[1]  # fmt: skip
    space, prompt = TokenSpace.codes((T,), 16, V), torch.arange(8).view(2, 4)
    sampler = resolve_sampler(SPECS[1])[0]
    broken = sampler(CausalTarget(adapter, prompt, space, Law()), CounterDraws([0, 1]))
    whole = sampler(CausalTarget(CausalLM(net), prompt, space, Law()), CounterDraws([0, 1]))
    assert calls and not torch.equal(broken.tokens, whole.tokens)


def test_what_is_not_compiled_is_refused():
    other = MistralForCausalLM(MistralConfig(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)).eval()
    with pytest.raises(GenError, match="compile came with MistralForCausalLM; expected a plain Llama"):
        compiled_forward(CausalLM(other))
    assert compiled("cpu", "eager") is compiled("cpu", "eager")
