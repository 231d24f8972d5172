"""``compile`` of every family: the same greedy tokens as without, in at most four graphs."""

from __future__ import annotations

import chameleon_files
import pytest
import tiny_emu3
import tiny_janus
import torch
from compiling import grown, masked_rows, needs_compiler
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import CausalLM
from gen.models.published.chameleon import ChameleonLM
from gen.models.published.janus import JanusLM
from gen.models.published.llada2 import BlockCausalLM
from gen.models.published.llamagen import LlamaGen, LlamaGenLM, Sizes
from gen.models.targets.causal import CausalTarget

V, T, MOST = 24, 12, 4
SIZES = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATE = [
    {"name": "speculative_jacobi", "window": 4},
    {"name": "autoregressive"},
]


def qwen3():
    return CausalLM(
        grown(Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8)))
    )


def gpt_neox():
    return CausalLM(grown(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))))


def llama3():
    return CausalLM(grown(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3))))


def emu3(tmp_path):
    from transformers import Emu3ForConditionalGeneration

    net = Emu3ForConditionalGeneration.from_pretrained(tiny_emu3.written(tmp_path)).double().eval()
    ids = torch.arange(len(tiny_emu3.NAMES), len(tiny_emu3.NAMES) + V)
    return MappedLM(net, Vocabulary(ids, net.config.text_config.vocab_size))


def chameleon(tmp_path):
    from transformers import ChameleonForConditionalGeneration

    folder = chameleon_files.write_chameleon(tmp_path)
    net = grown(ChameleonForConditionalGeneration.from_pretrained(folder))
    return ChameleonLM(net, Vocabulary(range(8, 8 + V), net.config.vocab_size))


def janus(tmp_path):
    from transformers import JanusForConditionalGeneration

    path = tiny_janus.written(tmp_path)
    return JanusLM(JanusForConditionalGeneration.from_pretrained(path).double())


def llamagen():
    sizes = Sizes(V, 16, 1, 2, 1, 24, 1, classes=5)
    return LlamaGenLM(grown(LlamaGen(sizes, 4)))


def adapter_of(name: str, tmp_path):
    torch.manual_seed(0)
    make = globals()[name]
    return make(tmp_path) if name in ("chameleon", "emu3", "janus") else make()


def decode(adapter, spec, rows: int, prompt_length: int = 3):
    sampler = resolve_sampler(spec)[0]
    size = adapter.vocab_size
    prompt = torch.arange(rows * prompt_length).view(rows, prompt_length) % 5 + size * isinstance(
        adapter, LlamaGenLM
    )
    if isinstance(adapter, LlamaGenLM):
        prompt = prompt[:, :1]
    target = CausalTarget(
        adapter, prompt, TokenSpace.codes((T,), size, size), SamplingParams(temperature=0.0)
    )
    return sampler(target, CounterRNG(range(rows)))


def compare(name: str, backend: str, tmp_path) -> int:
    """Compare greedy tokens with and without graphs; return the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    adapter = adapter_of(name, tmp_path)
    wanted = [decode(adapter, spec, rows) for spec in LATE for rows in (3, 1)]
    compiled_forward(adapter, backend)
    made = [decode(adapter, spec, rows) for spec in LATE for rows in (3, 1)]
    for want, got in zip(wanted, made, strict=True):
        assert torch.equal(got.tokens, want.tokens)
        assert [s.nfe for s in got.stats] == [s.nfe for s in want.stats]
    assert all(len(w.tokens.unique()) > 2 for w in wanted[:1])
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


slow = pytest.mark.slow
FAMILIES = ["llamagen"] + [
    pytest.param(name, marks=slow)
    for name in ("qwen3", "gpt_neox", "llama3", "emu3", "chameleon", "janus")
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_the_same_tokens_in_at_most_four_graphs(name, tmp_path):
    assert 1 <= compare(name, "eager", tmp_path) <= MOST


@slow
@needs_compiler
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "chameleon", "emu3", "janus", "llamagen"])
def test_compiled_kernels_of_a_family_decode_the_same_tokens(name, tmp_path):
    assert 1 <= compare(name, "inductor", tmp_path) <= MOST


@slow
@needs_compiler
def test_control_widths_that_equal_the_heads_have_graphs_of_their_own(tmp_path, monkeypatch):
    """The windows of the test are as wide as the heads of queries and keys are many."""
    adapter = adapter_of("chameleon", tmp_path)
    assert adapter.constant_widths == {2, 4}
    monkeypatch.setattr(ChameleonLM, "constant_widths", property(lambda self: (), lambda *_: None))
    assert compare("chameleon", "inductor", tmp_path) > MOST


@slow
def test_padded_widths_change_no_token(tmp_path):
    """Widths are padded to powers of two where a CUDA graph has one width."""
    adapter = adapter_of("qwen3", tmp_path)
    spec = {"name": "speculative_jacobi", "window": 5}
    want = decode(adapter, spec, 3)
    compiled_forward(adapter, "eager")
    adapter.graphs.pads, widths = True, set()
    run = adapter.graphs._slots
    adapter.graphs._slots = lambda adapter, inputs, positions, *rest: (
        widths.add(positions.shape[1]),
        run(adapter, inputs, positions, *rest),
    )[1]
    assert torch.equal(decode(adapter, spec, 3).tokens, want.tokens)
    assert widths and all(w & (w - 1) == 0 for w in widths)


@slow
@pytest.mark.parametrize("spec", ["halton", {"name": "fast_dllm", "cache": "dual"}], ids=str)
def test_a_masked_class_of_transformers_decodes_the_same_tokens(spec):
    """Dream is a Qwen 2 of full attention, which the fast forward does not take."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = grown(Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1)))
    sampler = resolve_sampler(spec)[0]
    want, got = (
        sampler(masked_rows(net, b, T, guided=False), CounterRNG(range(3))) for b in (None, "eager")
    )
    assert torch.equal(got.tokens, want.tokens)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * MOST


class Chooses(torch.nn.Module):
    """Language model one of whose steps depends on a value."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids, cache=None, **more):
        if int(input_ids.sum()) % 2:
            input_ids = input_ids.clone()
        return self.inner(input_ids=input_ids, cache=cache, **more)


def test_a_network_that_depends_on_values_is_refused_by_name():
    torch._dynamo.reset()
    adapter = CausalLM(Chooses(qwen3().model))
    compiled_forward(adapter, "eager")
    with pytest.raises(GenError, match="compile cannot trace Chooses as one graph"):
        decode(adapter, LATE[1], 2)


def test_a_network_of_experts_is_refused_before_anything_runs():
    adapter = BlockCausalLM(qwen3().model)
    with pytest.raises(GenError, match="does not support Qwen3ForCausalLM as BlockCausalLM"):
        compiled_forward(adapter)
