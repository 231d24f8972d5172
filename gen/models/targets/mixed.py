"""Batches whose rows differ in sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gen.core.distributions import wide_dtype
from gen.core.sampling_params import SamplingParams

Groups = list[tuple[SamplingParams, list[int]]]  # sampling parameters, and rows that have them


def grouped(rows: Sequence[SamplingParams]) -> Groups:
    """Group rows by their sampling parameters, which differ in ``FILTERS`` alone.

    Args:
        rows: sampling parameters of each row.
    """
    groups: dict[tuple[float, ...], tuple[SamplingParams, list[int]]] = {}
    for row, params in enumerate(rows):
        key = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.guidance_scale,
        )
        groups.setdefault(key, (params, []))[1].append(row)
    return list(groups.values())


def logprobs_of_groups(
    groups: Groups,
    logits: Tensor,
    uncond: Tensor | None,
    legal: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Make log-probabilities [B, L, V] of rows with several sampling parameters.

    Args:
        groups: sampling parameters and their rows.
        logits: floats [B, L, V] of the conditional branch of guidance.
        uncond: those of the unconditional branch; None without one.
        legal: allowed tokens, bool, broadcastable to [B, L, V]; None where all are.
        bias: number added to the logits of all positions, float [V]; None where it is nothing.
    """
    out = logits.new_empty(logits.shape, dtype=wide_dtype(logits.dtype))
    by_row = legal is not None and legal.ndim == 3 and len(legal) > 1
    for params, rows in groups:
        index = torch.tensor(rows, device=logits.device)
        z = params.guide(logits[index], None if uncond is None else uncond[index])
        if bias is not None:
            z = z + bias.to(z)
        allowed = legal[index] if legal is not None and by_row else legal
        out[index] = params(z, None, allowed, consume=True)
    return out
