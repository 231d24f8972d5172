"""VATT's model of sounds on tiny random weights in the published layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.layouts import make_layout, space
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.published.vatt import (
    HEAD,
    Vatt,
    VattLM,
    VattSizes,
    alibi,
    by_frame,
    load_vatt,
)
from gen.models.targets.masked import MaskedTarget

SIZES = VattSizes(
    width=12, states=10, heads=2, encoder=2, decoder=1, codes=5, streams=3, latent=4, positions=40
)
FRAMES = 6


def published(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names of a published checkpoint, the language model included."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"audio_token_decoder.{key}": torch.randn(x.shape, generator=generator) * 0.3
        for key, x in Vatt(SIZES).state_dict().items()
    }
    # one norm serves all layers of the encoder, and is stored under each name
    first = "audio_token_decoder.encoder.attn_layers."
    for way in ("A.weight", "A.bias", "B.weight", "B.bias"):
        shared = state[f"{first}final_norm.{way}"]
        for layer in range(2 * SIZES.encoder):
            state[f"{first}layers.{layer}.0.0.{way}"] = shared
    name = "encoder.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    return state | {name: torch.zeros(2, 2)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "vatt.ckpt"
    torch.save({"state_dict": published(), "epoch": 3}, path)
    return path


@pytest.fixture
def tables():
    shape = SIZES.streams, SIZES.codes, SIZES.latent
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def conditions(*lengths: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"states": torch.randn(n, SIZES.states, generator=generator)} for n in lengths]


def plain(state: dict[str, Tensor], states: Tensor, codes: Tensor, tables: Tensor) -> Tensor:
    """Heads' logits [K, T, V] of one row, written out head by head and row by row."""
    w = {k.removeprefix("audio_token_decoder."): v for k, v in state.items()}
    split = len(states)

    def attention(x: Tensor, name: str) -> Tensor:
        parts = []
        for head in range(SIZES.heads):
            here = slice(head * HEAD, (head + 1) * HEAD)
            q, k, v = (x @ w[f"{name}.to_{part}.weight"][here].T for part in "qkv")
            slope = 2 ** (-8 * (head + 1) / SIZES.heads)
            scores = q @ k.T / math.sqrt(HEAD)
            for i in range(len(x)):
                for j in range(len(x)):
                    scores[i, j] -= slope * abs(i - j)
            parts.append(scores.softmax(-1) @ v)
        return torch.cat(parts, 1) @ w[f"{name}.to_out.weight"].T

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def mlp(x: Tensor, name: str) -> Tensor:
        return F.gelu(x @ w[f"{name}.ff.0.0.weight"].T) @ w[f"{name}.ff.2.weight"].T

    def ways(f, x: Tensor, name: str) -> Tensor:
        return torch.cat([f(x[:split], f"{name}.A"), f(x[split:], f"{name}.B")])

    masks = w["embedding.special.MASK"]
    latents = [
        sum(
            masks[k] if codes[k, t] == SIZES.codes else tables[k, codes[k, t]]
            for k in range(SIZES.streams)
        )
        for t in range(codes.shape[1])
    ]
    a = torch.stack(latents) @ w["embedding.out_proj.weight"].T + w["embedding.out_proj.bias"]
    v = states @ w["img_linear.weight"].T + w["img_linear.bias"]
    at = w["pos_embed"][0]
    v, a = v + at[:split] + w["modality_v"][0], a + at[split:][: len(a)] + w["modality_a"][0]
    x, first = torch.cat([v, a]), "encoder.attn_layers"
    for n in range(0, 2 * SIZES.encoder, 2):
        x = x + attention(ways(norm, x, f"{first}.layers.{n}.0.0"), f"{first}.layers.{n}.1")
        y = ways(norm, x, f"{first}.layers.{n + 1}.0.0")
        x = x + ways(mlp, y, f"{first}.layers.{n + 1}.1")
    x, first = ways(norm, x, f"{first}.final_norm"), "decoder.attn_layers"
    for n in range(0, 2 * SIZES.decoder, 2):
        x = x + attention(norm(x, f"{first}.layers.{n}.0.0"), f"{first}.layers.{n}.1")
        x = x + mlp(norm(x, f"{first}.layers.{n + 1}.0.0"), f"{first}.layers.{n + 1}.1")
    x = norm(x, f"{first}.final_norm")[split:]
    return torch.stack([x @ w[f"classifier.{k}.weight"].T for k in range(SIZES.streams)])


def test_a_published_checkpoint_gives_the_logits_of_a_plain_forward(file, tables):
    lm = load_vatt(file, tables, dtype=torch.float64)
    codes = torch.randint(SIZES.codes + 1, (1, SIZES.streams, FRAMES))
    states = conditions(7)[0]["states"].double()
    state = {k: v.double() for k, v in published().items()}
    expected = plain(state, states, codes[0], tables.double())
    found = lm.model(states[None], codes, tables.double(), torch.tensor([False]))[0]
    assert torch.allclose(found, expected, atol=1e-10)
    nothing = lm.model(states[None], codes, tables.double(), torch.tensor([True]))[0]
    assert not torch.allclose(nothing, expected, atol=1e-3)  # the null condition


def test_the_released_map_is_kept_and_the_straight_one_is_another():
    targets = torch.randint(SIZES.codes, (1, SIZES.streams, FRAMES))
    # released training flattens logits as (k, t) and targets as (t, k)
    flat = targets.transpose(1, 2).flatten(1)
    heads = F.one_hot(flat, SIZES.codes).double().mul(50).unflatten(1, (SIZES.streams, FRAMES))
    loss = F.cross_entropy(heads.flatten(1, 2)[0], flat[0])
    assert loss < 1e-12  # what that training asks for
    decoded = by_frame(heads, permuted=True).argmax(-1).transpose(1, 2)
    assert torch.equal(decoded, targets)
    assert not torch.equal(by_frame(heads, permuted=False).argmax(-1).transpose(1, 2), targets)
    own = F.one_hot(targets, SIZES.codes).double().mul(50)
    assert torch.equal(by_frame(own, permuted=False).argmax(-1).transpose(1, 2), targets)


def test_slopes_of_heads_that_are_no_power_of_two_take_every_second_of_the_next():
    bias = alibi(3, 4)
    assert bias[:, 0, 1].tolist() == [-(2**-4), -(2**-8), -(2**-2)]
    assert torch.equal(bias, bias.transpose(1, 2)) and not bias.diagonal(dim1=1, dim2=2).any()


def canvas_space():
    layout = make_layout(
        "flatten",
        sizes=(SIZES.codes,) * SIZES.streams,
        grid=(FRAMES,),
        order="time_major",
        vocabulary="shared",
    )
    return space(layout, SIZES.codes, torch.zeros(SIZES.codes, 1), SIZES.codes + 1)


def target(lm: VattLM, given: list[dict[str, Tensor]], scale: float = 1.0) -> MaskedTarget:
    numbers = range(len(given))
    prompt = torch.tensor([[lm.condition_token(n)] for n in numbers])
    without = torch.tensor([[lm.null_token(n)] for n in numbers])
    sampling = SamplingParams(guidance_scale=scale)
    uncond = without if sampling.guided else None
    return MaskedTarget(lm.conditioned(given), prompt, canvas_space(), sampling, uncond)


def test_conditions_of_unequal_length_in_a_batch_equal_each_alone(file, tables):
    lm, given = load_vatt(file, tables, dtype=torch.float64), conditions(7, 3, 7)
    canvas = torch.full((3, FRAMES * SIZES.streams), SIZES.codes)
    canvas[:, 4] = 1
    together = target(lm, given, 3.0).predict(canvas).logprobs
    for row, one in enumerate(given):
        alone = target(lm, [one], 3.0).predict(canvas[:1]).logprobs[0]
        assert torch.allclose(together[row], alone, atol=1e-10)
    assert not torch.allclose(together[0], together[2])


def test_guidance_zero_is_no_condition(file, tables):
    lm = load_vatt(file, tables, dtype=torch.float64)
    canvas = torch.full((1, FRAMES * SIZES.streams), SIZES.codes)
    one, two = (target(lm, [c], 0.0).predict(canvas).logprobs for c in conditions(5, 5))
    assert torch.allclose(one, two, atol=1e-10)
    one, two = (target(lm, [c], 1.0).predict(canvas).logprobs for c in conditions(5, 5))
    assert not torch.allclose(one, two, atol=1e-3)


@pytest.mark.parametrize("permuted", [True, False])
def test_masked_samplers_fill_the_canvas_in_their_passes(file, tables, permuted):
    lm = load_vatt(file, tables, permuted=permuted)
    sampler = registry.get("sampler", "masked_iterative")(steps=4, order="confidence")
    out = sampler(target(lm, conditions(4, 6), 2.0), CounterRNG([1, 2]))
    assert out.tokens.shape == (2, FRAMES * SIZES.streams)
    assert int(out.tokens.max()) < SIZES.codes and [s.nfe for s in out.stats] == [4, 4]


def test_weights_that_do_not_fit_are_refused(tmp_path, tables):
    state = published()
    del state["audio_token_decoder.decoder.attn_layers.final_norm.bias"]
    torch.save({"state_dict": state}, tmp_path / "short.ckpt")
    with pytest.raises(GenError, match=r"1 missing: decoder.attn_layers.final_norm.bias"):
        load_vatt(tmp_path / "short.ckpt", tables)
    torch.save({"state_dict": {"encoder.x": torch.zeros(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(GenError, match="expected those of VATT"):
        load_vatt(tmp_path / "other.ckpt", tables)
    torch.save({"state_dict": published()}, tmp_path / "vatt.ckpt")
    with pytest.raises(GenError, match="codebooks have shape"):
        load_vatt(tmp_path / "vatt.ckpt", tables[:2])
