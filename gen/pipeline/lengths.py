"""Lengths of rows of a masked model, drawn before anything else is decoded.

On an empty canvas, the probability of the eos token at position t is that of a row of at most t
positions. With F(t) that probability at the first position of frame t, made non-decreasing, a row
has n frames with probability F(n) - F(n - 1), and all frames with what is left. This takes one
forward pass, or one for every ``max_batch`` rows. After it no position before the end may hold the
eos token.
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
    target: MaskedTarget, rng: RNG, canvas: Tensor, max_batch: int | None = None
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Draw where every row ends.

    Args:
        target: masked target whose space has an eos token.
        rng: random numbers of the rows.
        canvas: long [B, T].
        max_batch: rows per forward pass; None takes all at once.

    Returns:
        The canvas [B, T] with eos tokens filled in, and the positions of its own that each row had
        computed, and those with padding.
    """
    space = target.space
    streams = space.length // space.grid[0]
    eos_logprobs, num_computed = [], []
    for rows in torch.arange(len(canvas), device=canvas.device).split(max_batch or len(canvas)):
        out = target.predict(canvas[rows], rows)
        logprobs = out.logprobs
        # a copy: a view would hold the whole distribution in memory
        eos = logprobs[:, ::streams, space.eos_token_id].to(torch.float64, copy=True)
        eos_logprobs.append(eos)
        counts = (out.num_computed_tokens, out.num_computed_positions)
        lists = [torch.as_tensor(x).expand(len(rows)).tolist() for x in counts]
        num_computed += zip(*lists, strict=True)
    ended = torch.cat(eos_logprobs).exp()
    filled = ~space.is_masked(canvas[:, ::streams])
    ended = ended.masked_fill(filled, 0.0).cummax(1).values
    logprobs = (
        torch.cat([ended, ended.new_ones(len(ended), 1)], 1)
        .diff(dim=1, prepend=ended.new_zeros(len(ended), 1))
        .log()
    )
    rows = torch.arange(len(canvas), device=canvas.device)
    start = rows.new_zeros(len(rows), 1)
    active = torch.ones_like(start, dtype=torch.bool)
    frames = rng.categorical(logprobs[:, None], rows, start, "length", None, active)
    behind_end = torch.arange(space.length, device=canvas.device) >= frames * streams
    return torch.where(behind_end, space.eos_token_id, canvas), num_computed


def without_eos(space: TokenSpace) -> TokenSpace:
    """Return the space of the positions before the end, once it is known where that is."""
    if space.eos_token_id is None:
        return space
    legal = space.legal.clone()
    legal[:, space.eos_token_id] = False
    return replace(space, legal=legal)


def add_length_pass(out: SampleOutput, num_computed: list[tuple[int, int]]) -> SampleOutput:
    """Return the output with the forward pass of ``draw_lengths`` counted in its statistics."""
    stats = []
    for row, (computed, positions) in zip(out.stats, num_computed, strict=True):
        nfe = row.nfe + 1
        stats.append(
            replace(
                row,
                nfe=nfe,
                tokens_computed=row.tokens_computed + computed,
                positions_computed=row.positions_computed + positions,
                mean_acceptance_length=row.tokens / nfe,
            )
        )
    return replace(out, stats=stats)
