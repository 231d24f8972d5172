"""DASpeech on tiny random weights in the layout of its fairseq checkpoints."""

from __future__ import annotations

import argparse
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.nets.lattice import matches, posterior
from gen.models.published.daspeech import (
    BOS,
    EOS,
    FIRST,
    UNK,
    DASpeech,
    DASpeechSizes,
    load_daspeech,
    waves,
)
from gen.models.targets.lattice import LatticeTarget

SIZES = DASpeechSizes(
    mel=5,
    channels=6,
    width=8,
    layers=2,
    inner=10,
    kernel=3,
    vocab_size=9,
    graph_width=12,
    graph_layers=2,
    graph_inner=14,
    positions=40,
    voice_width=8,
    adaptor=11,
    voice_layers=(1, 1),
    voice_inner=7,
    voice_kernel=3,
    predictor=6,
    predictor_kernel=3,
    bins=6,
    frames=5,
    heads=(2, 3, 2),
)
PITCH, ENERGY = (-2.0, 2.0), (-1.0, 1.0)


def published(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names of fairseq."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, x in DASpeech(SIZES).state_dict().items():
        name = key
        for ours, theirs in (
            (r"(ffn[12])_layer_norm\.", r"\1.layer_norm."),
            (r"(ffn[12])\.intermediate_dense\.", r"\1.w_1."),
            (r"(ffn[12])\.output_dense\.", r"\1.w_2."),
        ):
            name = re.sub(ours, theirs, name)
        value = torch.randn(x.shape, generator=generator) * 0.3 if x.is_floating_point() else x
        state[name] = value.abs() + 0.5 if name.endswith("running_var") else value
    state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    state["tts.var_adaptor.duration_predictor.proj.bias"] = torch.tensor([1.2])  # some frames
    unread = {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_length.weight": torch.zeros(256, SIZES.width),
        "tts.embed_tokens.weight": torch.zeros(SIZES.vocab_size, SIZES.voice_width),
        "tts.embed_positions._float_tensor": torch.zeros(1),
    }
    return state | unread


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "daspeech.pt"
    torch.save({"args": argparse.Namespace(arch="s2s"), "model": published()}, path)
    return path


@pytest.fixture
def lm(file):
    return load_daspeech(file, PITCH, ENERGY, voice_heads=2, dtype=torch.float64)


def sounds(*lengths: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"mel": torch.randn(n, SIZES.mel, generator=generator)} for n in lengths]


def weights() -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in published().items()}


def norm(w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def relative_attention(w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    """Attention with relative positions (Transformer-XL), pair by pair."""
    heads, size = w[f"{name}.pos_bias_u"].shape
    q, k, v = (linear(w, x, f"{name}.linear_{p}").unflatten(1, (heads, size)) for p in "qkv")
    rates = torch.exp(torch.arange(0, x.shape[1], 2) * -(math.log(10000) / x.shape[1])).double()
    scores = x.new_zeros(heads, len(x), len(x))
    for i in range(len(x)):
        for j in range(len(x)):
            wave = torch.stack([((i - j) * rates).sin(), ((i - j) * rates).cos()], 1).flatten()
            at = linear(w, wave, f"{name}.linear_pos").unflatten(0, (heads, size))
            content = ((q[i] + w[f"{name}.pos_bias_u"]) * k[j]).sum(-1)
            scores[:, i, j] = content + ((q[i] + w[f"{name}.pos_bias_v"]) * at).sum(-1)
    mixed = torch.einsum("hij,jhd->ihd", (scores / math.sqrt(size)).softmax(-1), v)
    return linear(w, mixed.flatten(1), f"{name}.linear_out")


def plain_encoder(w: dict[str, Tensor], mel: Tensor) -> Tensor:
    x = mel.T
    for n in range(2):
        name = f"encoder.subsample.conv_layers.{n}"
        x = F.glu(F.conv1d(x, w[f"{name}.weight"], w[f"{name}.bias"], 2, 2), 0)
    x = linear(w, math.sqrt(SIZES.width) * x.T, "encoder.linear")
    for n in range(SIZES.layers):
        name = f"encoder.conformer_layers.{n}"

        def mlp(x: Tensor, part: str, name: str = name) -> Tensor:
            y = linear(w, norm(w, x, f"{name}.{part}.layer_norm"), f"{name}.{part}.w_1")
            return linear(w, F.silu(y), f"{name}.{part}.w_2")

        x = x + 0.5 * mlp(x, "ffn1")
        y = norm(w, x, f"{name}.self_attn_layer_norm")
        x = x + relative_attention(w, y, f"{name}.self_attn")
        conv = f"{name}.conv_module"
        y = F.conv1d(norm(w, x, f"{conv}.layer_norm").T, w[f"{conv}.pointwise_conv1.weight"])
        side = SIZES.kernel // 2
        depthwise = w[f"{conv}.depthwise_conv.weight"]
        y = F.conv1d(F.glu(y, 0), depthwise, None, 1, side, 1, SIZES.width)
        norms = (w[f"{conv}.batch_norm.{p}"] for p in ("running_mean", "running_var"))
        affine = (w[f"{conv}.batch_norm.{p}"] for p in ("weight", "bias"))
        y = F.silu(F.batch_norm(y[None], *norms, *affine))[0]
        x = x + F.conv1d(y, w[f"{conv}.pointwise_conv2.weight"]).T
        x = norm(w, x + 0.5 * mlp(x, "ffn2"), f"{name}.final_layer_norm")
    return x


def attention(w: dict[str, Tensor], name: str, heads: int, width: int, memory: int):
    """torch's attention with fairseq's weights."""
    module = nn.MultiheadAttention(width, heads, kdim=memory, vdim=memory, batch_first=True)
    module = module.double().eval()
    state = {
        "in_proj_bias": torch.cat([w[f"{name}.{p}_proj.bias"] for p in "qkv"]),
        "out_proj.weight": w[f"{name}.out_proj.weight"],
        "out_proj.bias": w[f"{name}.out_proj.bias"],
    }
    parts = [w[f"{name}.{p}_proj.weight"] for p in "qkv"]
    if memory == width:
        state["in_proj_weight"] = torch.cat(parts)
    else:
        state |= {f"{p}_proj_weight": x for p, x in zip("qkv", parts, strict=True)}
    module.load_state_dict(state)
    return lambda x, y: module(x[None], y[None], y[None], need_weights=False)[0][0]


def plain_states(w: dict[str, Tensor], memory: Tensor, vertices: int) -> Tensor:
    d, heads = SIZES.graph_width, SIZES.heads[1]
    ids = torch.tensor([BOS, *[UNK] * (vertices - 2), EOS])
    x = math.sqrt(d) * w["decoder.embed_tokens.weight"][ids]
    x = x + w["decoder.embed_positions.weight"][FIRST : FIRST + vertices]
    for n in range(SIZES.graph_layers):
        name = f"decoder.layers.{n}"
        own = attention(w, f"{name}.self_attn", heads, d, d)
        cross = attention(w, f"{name}.encoder_attn", heads, d, SIZES.width)
        x = norm(w, x + own(x, x), f"{name}.self_attn_layer_norm")
        x = norm(w, x + cross(x, memory), f"{name}.encoder_attn_layer_norm")
        y = linear(w, F.gelu(linear(w, x, f"{name}.fc1")), f"{name}.fc2")
        x = norm(w, x + y, f"{name}.final_layer_norm")
    return x


def test_a_published_checkpoint_gives_the_graph_of_a_plain_forward(lm):
    w, mel = weights(), sounds(19)[0]["mel"].double()
    memory = plain_encoder(w, mel)
    assert torch.allclose(lm.model.encoder(mel), memory, atol=1e-6)  # waves are in float32
    graph = lm.conditioned([{"mel": mel}]).forward(
        torch.tensor([[lm.condition_token(0)]]), torch.tensor([1])
    )
    assert graph.lengths.tolist() == [9]  # half of the frames
    states = plain_states(w, memory, 9)
    assert torch.allclose(graph.states[0], states, atol=1e-5)
    logits = states @ w["decoder.embed_tokens.weight"].T
    assert torch.allclose(graph.emissions[0], logits.log_softmax(-1), atol=1e-4)
    x = torch.cat([states, w["decoder.link_positional.weight"][FIRST : FIRST + 9]], 1)
    q, k = (linear(w, x, f"decoder.{p}_linear").unflatten(1, (3, -1)) for p in ("query", "key"))
    gate = linear(w, x, "decoder.gate_linear").softmax(-1)
    for i in range(8):
        scores = torch.einsum("hd,jhd->hj", q[i], k[i + 1 :]) / math.sqrt(q.shape[-1])
        row = (gate[i][:, None] * scores.softmax(-1)).sum(0)
        assert torch.allclose(graph.transitions[0, i, i + 1 :].exp(), row, atol=1e-5)


def test_the_synthesiser_speaks_the_states_as_a_plain_forward_does(lm):
    w, heads = weights(), SIZES.heads[2]
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(4, SIZES.graph_width, generator=generator).double()
    x = linear(w, F.relu(linear(w, states, "adaptor.fc1")), "adaptor.fc2")
    d = x.shape[1]

    def layer(x: Tensor, name: str) -> Tensor:
        own = attention(w, f"{name}.self_attn", heads, d, d)
        x = norm(w, x + own(x, x), f"{name}.layer_norm")
        y = x.T
        for n in (0, 2):
            y = F.conv1d(y, w[f"{name}.ffn.ffn.{n}.weight"], w[f"{name}.ffn.ffn.{n}.bias"], 1, 1)
            y = y.relu() if n == 0 else y
        return norm(w, x + y.T, f"{name}.ffn.layer_norm")

    def predict(x: Tensor, part: str) -> Tensor:
        name = f"tts.var_adaptor.{part}_predictor"
        for n in (1, 2):
            conv = w[f"{name}.conv{n}.0.weight"], w[f"{name}.conv{n}.0.bias"]
            x = norm(w, F.conv1d(x.T, *conv, 1, 1).relu().T, f"{name}.ln{n}")
        return linear(w, x, f"{name}.proj")[:, 0]

    x = x + w["tts.pos_emb_alpha"] * waves(4, x)
    x = layer(x, "tts.encoder_fft_layers.0")
    frames = [max(0, round(math.exp(v) - 1)) for v in predict(x, "duration").tolist()]
    for part, ends in (("pitch", PITCH), ("energy", ENERGY)):
        borders = torch.linspace(*ends, SIZES.bins - 1)
        bins = [int((borders < v).sum()) for v in predict(x, part).tolist()]
        x = x + w[f"tts.var_adaptor.embed_{part}.weight"][bins]
    x = torch.cat([x[i : i + 1].expand(n, -1) for i, n in enumerate(frames)])
    assert len(x) > 4
    x = layer(x + w["tts.dec_pos_emb_alpha"] * waves(len(x), x), "tts.decoder_fft_layers.0")
    assert torch.allclose(lm.speak(states), linear(w, x, "tts.out_proj"), atol=1e-8)


def test_unequal_sounds_in_a_batch_equal_each_alone(lm):
    given = sounds(19, 30, 11)
    prompts = torch.tensor([[lm.condition_token(n)] for n in (0, 1, 2)])
    together = lm.conditioned(given).forward(prompts, torch.ones(3, dtype=torch.long))
    for row, one in enumerate(given):
        alone = lm.conditioned([one]).forward(prompts[:1], torch.tensor([1]))
        n = int(alone.lengths[0])
        assert int(together.lengths[row]) == n
        assert torch.equal(together.transitions[row, :n, :n], alone.transitions[0])
        assert torch.equal(together.emissions[row, :n], alone.emissions[0])


DECODERS = ("dag_greedy", "lookahead", "viterbi", "joint_viterbi", "dag_beam", "ancestral")


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_graphs_run_on_it(lm, name):
    legal = torch.ones(6, SIZES.vocab_size, dtype=torch.bool)
    legal[:, :EOS] = legal[:, UNK] = False
    space = TokenSpace((6,), SIZES.vocab_size, legal, eos_token_id=EOS)
    prompt = torch.tensor([[lm.condition_token(n)] for n in (0, 1)])
    target = LatticeTarget(lm.conditioned(sounds(19, 24)), prompt, space, SamplingParams())
    out = registry.get("sampler", name)()(target, CounterRNG([1, 2]))
    assert out.tokens.shape == (2, 6) and [s.nfe for s in out.stats] == [1, 1]
    assert not bool(torch.isin(out.tokens, torch.tensor([BOS, 1, UNK])).any())


def test_expected_states_follow_the_flag(file, lm):
    right = load_daspeech(file, PITCH, ENERGY, 2, released_posterior=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    links, emissions = (torch.randn(1, 7, n, generator=generator).double() for n in (7, 9))
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    links = links.masked_fill(~later, -torch.inf).log_softmax(-1).masked_fill(~later, -torch.inf)
    states = torch.randn(1, 7, 3, generator=generator).double()
    graph = Graph(links, 2 * emissions.log_softmax(-1), states, torch.tensor([7]))
    targets, counts = torch.tensor([[BOS, 5, 7, EOS]]), torch.tensor([4])
    m = matches(graph.emissions, targets)
    found = []
    for model, released in ((lm, True), (right, False)):
        weights = posterior(graph.transitions, m, graph.lengths, counts, released)
        found.append(model.expected_states(graph, targets, counts))
        assert torch.allclose(found[-1], weights @ graph.states)
        assert torch.allclose(weights.sum(-1), torch.ones(1, 4).double())
    assert (found[0] - found[1]).abs().max() > 0.01


def test_weights_that_do_not_fit_are_refused(tmp_path):
    state = published()
    del state["adaptor.fc1.bias"]
    torch.save({"model": state}, tmp_path / "short.pt")
    with pytest.raises(GenError, match=r"1 missing: adaptor.fc1.bias"):
        load_daspeech(tmp_path / "short.pt", PITCH, ENERGY, 2)
    torch.save({"model": {"x": torch.zeros(1)}}, tmp_path / "other.pt")
    with pytest.raises(GenError, match="expected those of DASpeech"):
        load_daspeech(tmp_path / "other.pt", PITCH, ENERGY)
