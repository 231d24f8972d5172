"""Every selector on the masked model of every modality: a filled grid of its own tokens, some
places of which are made anew."""

from __future__ import annotations

import functools

import pytest
import torch

import gen
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.pipeline.lengths import without_eos

PROMPTS = {
    "audio": "a red ball bounces 3 times, high",
    "image": "a small blue ring in the centre",
    "speech": "three seven",
    "video": "a red square moves right",
    "motion": "a person walks forward",
    "action": "reach",
    "text": "sort 3 1 2 =",
}
MODALITIES = [name for name, m in registry.table("modality").items() if "masked" in m.models]
EMPTY = 6


SELECTORS = list(registry.table("selector"))
CHEAPEST = "action"  # the shortest rows
# Every selector on the cheapest modality, every modality under one selector of its own. The other
# pairs take minutes.
PAIRS = [
    pytest.param(
        m, s, id=f"{m}-{s}", marks=[] if m == CHEAPEST or i == 3 * j else [pytest.mark.slow]
    )
    for j, m in enumerate(MODALITIES)
    for i, s in enumerate(SELECTORS)
]


@pytest.fixture(scope="module")
def case_of():
    """What `case_in` makes of a modality, once."""
    return functools.cache(case_in)


def case_in(modality: str):
    """A function that decodes rows of a modality anew under a sampler, the canvas [2, T] and where
    it is empty [2, T]."""
    pipe = gen.load(modality, dtype="float64")
    prompt = PROMPTS[modality]
    made = pipe(prompt, {"name": "maskgit", "steps": 3}, num_samples=2)
    sampler, sampling = pipe.resolve("maskgit", None)
    name = pipe.model_name(sampler)
    space = pipe.bound(name)[1].space
    space = without_eos(space) if pipe.modality.length_first else space
    generator = torch.Generator().manual_seed(3)
    tokens = made.tokens
    free = (space.legal.sum(1) > 1).expand(tokens.shape)
    if pipe.modality.length_first and space.eos_token_id is not None:
        free = free & (tokens != space.eos_token_id)
    empty = (
        torch.rand(tokens.shape, generator=generator).masked_fill(~free, 2).argsort(1).argsort(1)
        < EMPTY
    )
    canvas = tokens.masked_fill(empty, space.mask_token_id)

    def decode(sampler, rows):
        target = pipe.target(sampler, sampling, [made.items[r] for r in rows], name, space=space)
        return sampler(
            target, CounterRNG([pipe.draw_key(made.items[r]) for r in rows]), canvas=canvas[rows]
        )

    return decode, canvas, empty, space


@pytest.mark.parametrize(("modality", "selector"), PAIRS)
@pytest.mark.thinned(9)
def test_every_selector_fills_every_modality(case_of, modality, selector):
    decode, canvas, empty, space = case_of(modality)
    sampler, _ = resolve_sampler(
        {
            "name": "masked_iterative",
            "selector": selector,
            "steps": 4,
            "proposer": "argmax",
            "filter": "text-filter",
        }
    )
    out = decode(sampler, [0, 1])
    assert torch.equal(out.tokens[~empty], canvas[~empty]) and not bool(
        (out.tokens == space.mask_token_id).any()
    )
    position = torch.arange(space.length).expand(empty.shape)
    assert bool(space.legal[position, out.tokens][empty].all())
    assert all(1 <= s.nfe <= EMPTY == s.tokens for s in out.stats)
    alone = decode(sampler, [1])
    assert torch.equal(alone.tokens[0], out.tokens[1]) and alone.stats[0].nfe == out.stats[1].nfe
