"""How long a row of a masked model is: decided before anything else, by the model's own law of
where it ends.

On a canvas that says nothing, the probability of the end at place t is that of a row of at most t
places. So with F(t) that probability at the first place of frame t, made to grow, a row has n
frames with probability F(n) - F(n - 1), and all frames with what is left. One forward call, or one
for so many rows as may be in the batch; after it no place before the end may hold the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gen.core.rng import RNG
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.masked import MaskedTarget


def draw_lengths(
    target: MaskedTarget, rng: RNG, canvas: Tensor, at_most: int | None = None
) -> tuple[Tensor, list[int]]:
    """The canvas [B, T] of every row with its end filled in, and how many places of its own each
    row had computed. ``at_most``: rows per call."""
    space = target.space
    streams = space.length // space.grid[0]
    ends, positions = [], []
    for of in torch.arange(len(canvas), device=canvas.device).split(at_most or len(canvas)):
        out = target.predict(canvas[of], of)
        logprobs, computed = out.logprobs, out.num_computed_tokens
        ends.append(
            logprobs[:, ::streams, space.eos_token_id].to(torch.float64, copy=True)
        )  # a view would hold the whole law
        positions += computed.tolist() if isinstance(computed, Tensor) else [computed] * len(of)
    ended = torch.cat(ends).exp()
    taken = ~space.is_masked(canvas[:, ::streams])
    ended = ended.masked_fill(taken, 0.0).cummax(1).values
    logprobs = (
        torch.cat([ended, ended.new_ones(len(ended), 1)], 1)
        .diff(dim=1, prepend=ended.new_zeros(len(ended), 1))
        .log()
    )
    rows = torch.arange(len(canvas), device=canvas.device)
    start = rows.new_zeros(len(rows), 1)
    frames = rng.categorical(
        logprobs[:, None], rows, start, "length", None, torch.ones_like(start, dtype=torch.bool)
    )
    after = torch.arange(space.length, device=canvas.device) >= frames * streams
    return torch.where(after, space.eos_token_id, canvas), positions


def settled(space: TokenSpace) -> TokenSpace:
    """The space of places before the end, once it is known where that is."""
    if space.eos_token_id is None:
        return space
    legal = space.legal.clone()
    legal[:, space.eos_token_id] = False
    return replace(space, legal=legal)


def counted(out: SampleOutput, positions: list[int]) -> SampleOutput:
    """The same with the call that decided the lengths."""
    stats = []
    for s, more in zip(out.stats, positions, strict=True):
        nfe = s.nfe + 1
        stats.append(
            replace(
                s,
                nfe=nfe,
                tokens_computed=s.tokens_computed + more,
                mean_acceptance_length=s.tokens / nfe,
            )
        )
    return replace(out, stats=stats)
