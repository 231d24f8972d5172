"""Models that give no distribution are refused with model, item and position, by every loop. They
gave token 0 without a word."""

from __future__ import annotations

import math

import pytest
import torch
from closed_form import LinearMasked
from continuous import LinearHead, LinearLatent, latent_target
from tabular import (
    EMPTY,
    TabularBlocks,
    TabularCausal,
    TabularMasked,
    causal_target,
    masked_target,
    space_of,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.block import BlockTarget
from gen.models.targets.latent import MaskedLatentTarget
from gen.samplers.engine import causal_loop
from gen.samplers.masked import batch

POSITIONS, AT, ITEM = 6, 3, 1  # the position and the item without a distribution
IDS = 4
WRONG = {"nan": math.nan, "inf": math.inf, "all_minus_inf": -math.inf}
SAMPLING = {
    "plain": SamplingParams(),
    "argmax": SamplingParams(temperature=0),
    "filtered": SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01),
}
CAUSAL = {
    "autoregressive": {"name": "autoregressive"},
    **{
        f"jacobi-{name}": {"name": "speculative_jacobi", "coupling": name, "window": 4}
        for name in registry.table("coupling")
    },
    **{
        f"speculative-{name}": {"name": "speculative", "verifier": name}
        for name in ("token", "block")
    },
    "relaxed": {"name": "relaxed_acceptance", "verifier": "typical", "window": 4},
}
MASKED = ("masked_iterative", "maskgit", "fast_dllm", "klass", "rcr", "halton")
CHAINS = ("exact_speculative", "freedave")


class BrokenCausal(TabularCausal):
    """Model without a distribution at one position of the item whose prompt is the longest."""

    value = math.nan

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        is_item = (cache.ids[:, 0] == 12)[:, None]
        return self.broken(logits, is_item & (positions == 2 + AT))

    def broken(self, logits, where):
        """Logits with the value in place of one of them; -inf of all of them."""
        one = torch.zeros(logits.shape[-1], dtype=torch.bool)
        one[slice(None) if self.value == -math.inf else 2] = True
        return logits.masked_fill(where[..., None] & one, self.value)


class BrokenMasked(TabularMasked):
    """The same of a masked model."""

    value = math.nan
    broken = BrokenCausal.broken

    def forward(self, ids, canvas_length):
        logits = super().forward(ids, canvas_length)
        position = torch.arange(canvas_length)
        return self.broken(logits, (ids[:, 0] == 31 + ITEM)[:, None] & (position == AT))


def refused(run) -> str:
    with pytest.raises(GenError) as error:
        run()
    message = str(error.value)
    assert f"for item {ITEM} at position {AT}" in message and "expected" in message
    return message


def causal(spec: dict, value: float, sampling=SAMPLING["plain"], draft_too: bool = False):
    sampler = resolve_sampler(spec)[0]
    broken, fine = BrokenCausal(IDS, low=0.0), TabularCausal(IDS, 5, low=0.0)
    broken.value = value
    models = (fine, broken) if draft_too else (broken, fine)
    target, draft = (causal_target(m, space_of((6,), IDS), sampling, [0, 1, 2]) for m in models)
    target.name, draft.name = "text-causal", "text-draft"
    return sampler(target, CounterRNG([1, 2, 3]), draft=draft if sampler.drafted else None)


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("spec", CAUSAL.values(), ids=CAUSAL)
def test_causal_samplers(spec, value):
    assert "model text-causal" in refused(lambda: causal(spec, value))


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_sampling_parameters(sampling, value):
    refused(lambda: causal(CAUSAL["autoregressive"], value, sampling))


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_draft_models(value):
    message = refused(lambda: causal(CAUSAL["speculative-block"], value, draft_too=True))
    assert "model text-draft" in message


def test_logits_of_minus_inf_in_both_branches_of_guidance():
    class Guided(TabularCausal):
        def forward(self, tokens, positions, cache):
            logits = super().forward(tokens, positions, cache)
            logits[..., 2] = -math.inf
            return logits

    target = causal_target(
        Guided(IDS, low=0.0),
        space_of((6,), IDS),
        SamplingParams(guidance_scale=2.0),
        [0],
        empty=EMPTY,
    )
    with pytest.raises(GenError, match="item 0 at position 0.*both branches of guidance"):
        resolve_sampler("autoregressive")[0](target, CounterRNG([1]))


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", [*MASKED, *CHAINS])
def test_masked_samplers_and_chains(name, value):
    model = BrokenMasked(IDS + 1, low=0.0)
    model.value = value
    target = masked_target(model, space_of((6,), IDS, masked=True), SamplingParams(), [0, 1, 2])
    sampler = resolve_sampler(name)[0]
    assert "model BrokenMasked" in refused(lambda: sampler(target, CounterRNG([1, 2, 3])))


def test_blocks():
    class Broken(TabularBlocks):
        def forward(self, tokens, positions, last, cache):
            logits = super().forward(tokens, positions, last, cache)
            is_item = (cache.ids[:, 0] == ITEM)[:, None, None]
            return logits.masked_fill(is_item & (positions == 2 + 5)[..., None], math.nan)

    prompt = torch.tensor([[0, 9], [1, 9]])
    space = space_of((2, 4), IDS, masked=True)
    target = BlockTarget(Broken(IDS + 1, low=0.0), prompt, space, SamplingParams())
    with pytest.raises(GenError, match="for item 1 at position 5"):
        resolve_sampler("frame_blocks")[0](target, CounterRNG([1, 2]))


class BrokenHead(LinearHead):
    """Head whose latents are not finite where the condition says so."""

    def predict(self, x, k, z):
        out = super().predict(x, k, z)
        return torch.where(z.abs() > 1e6, math.inf, out)


class BrokenLatent(LinearLatent):
    """Model with a wild conditioning vector at one position of the second item."""

    def forward(self, inputs, positions, cache):
        z = super().forward(inputs, positions, cache)
        word = self.embed_words(torch.tensor([1]))[0]
        is_item = torch.isclose(cache.vectors[:, 0], word).all(-1)[:, None]
        return z.masked_fill((is_item & (positions == 2 + AT))[..., None], 1e9)


LATENT = {
    "autoregressive": {"name": "autoregressive"},
    "jacobi": {"name": "continuous_jacobi", "window": 3, "tolerance": 0.1},
    "speculative": {"name": "continuous_speculative", "num_speculative_tokens": 2},
}


@pytest.mark.parametrize("spec", LATENT.values(), ids=LATENT)
def test_latents(spec):
    sampler = resolve_sampler(spec)[0]
    target, draft = (
        latent_target(model, POSITIONS, [0, 1, 2])
        for model in (BrokenLatent(BrokenHead()), LinearLatent(LinearHead()))
    )
    draft = draft if sampler.drafted else None
    assert "latent is NaN" in refused(lambda: sampler(target, CounterRNG([1, 2, 3]), draft=draft))


class BrokenMaskedLatent(LinearMasked):
    """A NaN latent would stay masked, and its row would never end."""

    def forward(self, words, canvas):
        z = super().forward(words, canvas)
        z[words[:, 0] == ITEM, AT] = 1e9
        return z


def test_masked_latents():
    prompt = torch.tensor([[0, 3], [1, 3], [2, 3]])
    target = MaskedLatentTarget(
        BrokenMaskedLatent(BrokenHead(2)), prompt, TokenSpace.latents((6,), 2), SamplingParams()
    )
    sampler = resolve_sampler({"name": "masked_iterative", "steps": 6, "order": "random"})[0]
    refused(lambda: sampler(target, CounterRNG([1, 2, 3])))


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-300, 5e-324])
def test_temperatures_below_the_float_range_take_the_argmax(temperature):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        found = SamplingParams(temperature=temperature)(logits.to(dtype))
        assert torch.equal(found, SamplingParams(temperature=0)(logits.to(dtype)))
    with pytest.raises(GenError, match="no closed form; expected a number of at least 1e-05"):
        latent_target(LinearLatent(), 4, [0], SamplingParams(temperature=temperature))


# --- controls


def test_control_without_the_check_token_0_stands_there(monkeypatch):
    monkeypatch.setattr(causal_loop, "refuse_failed", lambda *args: None)
    out = causal(CAUSAL["autoregressive"], -math.inf)
    assert int(out.tokens[ITEM, AT]) == 0
    monkeypatch.setattr(batch, "refuse_failed", lambda *args: None)
    target = masked_target(
        BrokenMasked(IDS + 1, low=0.0), space_of((6,), IDS, masked=True), SamplingParams(), [0, 1]
    )
    tokens = resolve_sampler("maskgit")[0](target, CounterRNG([1, 2])).tokens
    assert tokens.shape == (2, POSITIONS)
