"""Closed-form masked model, canvas and checks for tests of masked samplers."""

from __future__ import annotations

from dataclasses import replace

import torch
from tabular import TabularMasked, masked_target
from torch import Tensor

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace

masked_iterative = registry.get("sampler", "masked_iterative")


IDS, GRID, POSITIONS, MASK, ROWS = 5, (4, 5), 20, 5, 6


SPACE = replace(
    TokenSpace.codes(GRID, IDS, IDS + 1, MASK), delimiters=(2, 4), rarity=torch.arange(1.0, IDS + 2)
)


SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guided": SamplingParams(temperature=0.9, top_k=3, guidance_scale=1.5),
}


MODEL = TabularMasked(IDS + 1, low=0.1)


def canvas() -> Tensor:
    """Rows with all, half, one, none and some places to fill, and all again."""
    out = (torch.arange(POSITIONS) * 3 % IDS).repeat(ROWS, 1)
    out[0], out[1, ::2], out[2, 7], out[4, 6:], out[5] = MASK, MASK, MASK, MASK, MASK
    return out


def run(
    sampler,
    sampling: SamplingParams = SAMPLING_CASES["plain"],
    rows: list[int] | None = None,
    **kwargs,
) -> SampleOutput:
    rows = list(range(ROWS)) if rows is None else rows
    rng = CounterRNG([31 * r + 7 for r in rows])
    return sampler(
        masked_target(MODEL, SPACE, sampling, [r % 3 for r in rows]),
        rng,
        canvas=canvas()[rows],
        **kwargs,
    )


def check_given(sampler) -> None:
    """Places that the canvas gave stay as they are, and no step says otherwise."""
    out = run(sampler, trace=True)
    given = canvas() != MASK
    assert torch.equal(out.tokens[given], canvas()[given]), "a given place was changed"
    for row, trace in enumerate(out.traces):
        touched = {n for step in trace for n in (*step.committed, *step.removed)}
        assert not touched & set(given[row].nonzero()[:, 0].tolist()), "a given place was touched"


def check_rows(sampler) -> None:
    """A row alone is that row of the batch."""
    whole = run(sampler)
    for row in range(ROWS):
        alone = run(sampler, rows=[row])
        assert (
            torch.equal(alone.tokens[0], whole.tokens[row])
            and alone.stats[0].nfe == whole.stats[row].nfe
        )
