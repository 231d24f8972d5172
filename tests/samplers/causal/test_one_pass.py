"""Drafting and verification in one pass: the distribution by enumeration on a tiny model, and what
the groups of masks say against recomputation without a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enumeration import distance, enumerate_distribution

from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.core.sampler import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.samplers.causal.drafters.one_pass import GroupNodes, OnePassDrafter

LENGTH, PREFIX, IDS = 4, 2, 2
PROMPT = torch.tensor([[IDS, IDS + 1]])


def shaped(length: int) -> Shape:
    return Shape((length,), PREFIX, IDS, 2)


def tiny(length: int) -> CausalLM:
    torch.manual_seed(0)
    net = new_lm(shaped(length), Run(0, 32, 2, tied=True)).double()
    with torch.no_grad():  # far from uniform
        net.model.embed_tokens.weight.mul_(15)
    return CausalLM(net)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny(LENGTH)


def target_of(model: CausalLM, rows: int, length: int = LENGTH, **space) -> CausalTarget:
    mask = shaped(length).mask
    tokens = TokenSpace.codes((length,), IDS, mask + 1, mask, **space)
    return CausalTarget(model, PROMPT.repeat(rows, 1), tokens, SamplingParams())


def streaming(drafts: int, **more) -> dict:
    return {
        "name": "speculative",
        "drafter": "streaming",
        "num_speculative_tokens": drafts,
        **more,
    }


def law_of(model: CausalLM, spec, **space) -> dict:
    sampler, _ = resolve_sampler(spec)

    def decode(rng, context):
        return sampler(target_of(model, len(context), **space), rng).tokens

    return enumerate_distribution(decode, 1)[0]


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_distribution_is_that_of_autoregression(model, drafts, verifier):
    exact = law_of(model, "autoregressive")
    assert max(exact.values()) < 0.9 and min(exact.values()) > 0
    assert distance(law_of(model, streaming(drafts, verifier=verifier)), exact) < 1e-12
