"""MaskGIT's rule, two frames of two codebooks with two codes each: the distribution of its outputs,
given the noise of its choices, equals a table that is built by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from enumeration import distance, enumerate_distribution, hashed
from tabular import TabularMasked, masked_target

from gen.contracts.layouts import make_layout, space
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace

FRAMES, STREAMS, CODES, STEPS, NOISE = 2, 2, 2, 2, 4.5
LENGTH = FRAMES * STREAMS


def grid() -> TokenSpace:
    """Space of frames of codebooks, whose ids follow each other."""
    layout = make_layout(
        "flatten",
        sizes=(CODES,) * STREAMS,
        grid=(FRAMES,),
        order="time_major",
        vocabulary="offset",
    )
    size = layout.code_ids
    return space(layout, size, torch.zeros(size, 1), size + 1)


def table(model: TabularMasked, sampling: SamplingParams, context: int, noise: float) -> dict:
    """Probabilities of outputs: after the first pass the two positions of most confidence stay."""
    legal, mask = grid().legal, grid().mask_token_id

    def rows(canvas: tuple[int, ...]) -> torch.Tensor:
        """Probabilities [T, V] of all positions of a canvas."""
        given, without = (
            torch.stack([model.at([*prompt, *canvas], LENGTH, n) for n in range(LENGTH)])
            for prompt in ([31 + context, 40], [50, 51 + context])
        )
        return sampling(given, without if sampling.guided else None, legal).exp()

    kept = math.floor(LENGTH * math.cos(math.pi / 2 * 1 / STEPS))
    out: dict[tuple[int, ...], float] = {}
    first = rows((mask,) * LENGTH)
    choices = [torch.nonzero(legal[n])[:, 0].tolist() for n in range(LENGTH)]
    gumbel = [-math.log(-math.log(hashed(context, n, "confidence", 0))) for n in range(LENGTH)]
    for proposed in product(*choices):
        mass = math.prod(float(first[n, v]) for n, v in enumerate(proposed))
        scores = [
            math.log(float(first[n, v])) + noise * (1 - 1 / STEPS) * gumbel[n]
            for n, v in enumerate(proposed)
        ]
        stays = sorted(range(LENGTH), key=lambda n: -scores[n])[: LENGTH - kept]
        canvas = tuple(proposed[n] if n in stays else mask for n in range(LENGTH))
        second = rows(canvas)
        for rest in product(*[[canvas[n]] if n in stays else choices[n] for n in range(LENGTH)]):
            share = math.prod(float(second[n, v]) for n, v in enumerate(rest) if n not in stays)
            out[rest] = out.get(rest, 0.0) + mass * share
    return out


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_outputs_have_the_distribution_of_the_table(scale):
    model = TabularMasked(grid().vocab_size, low=0.0, spread=2.0)
    sampling = SamplingParams(guidance_scale=scale)
    sampler = registry.get("sampler", "masked_iterative")(
        steps=STEPS, order="confidence", schedule="cosine", choice_temperature=NOISE
    )
    found = enumerate_distribution(
        lambda rng, c: sampler(masked_target(model, grid(), sampling, c), rng).tokens, 3
    )
    for context, one in enumerate(found):
        assert distance(one, table(model, sampling, context, NOISE)) < 1e-12
    # control: without noise in the choice of positions the table is another one
    silent = [table(model, sampling, context, 0.0) for context in range(3)]
    assert max(distance(a, b) for a, b in zip(found, silent, strict=True)) > 1e-3
