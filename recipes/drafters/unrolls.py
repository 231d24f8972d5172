"""Unrolled training of layers that draft from entries (``EntryLayer``)."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.models.draft_heads.entries import last_tokens
from gen.recipes.drafters.base import Net
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_exit import sequence_states


def unrolled(
    teacher: Teacher,
    net: Net,
    batch: Batch,
    unrolls: int,
    num_tokens: int = 1,
    noise: float = 0.0,
) -> list[Tensor]:
    """Return what the target's head reads, [B, T, D], for every position by every unroll.

    Position t of unroll i is drafted from the hidden states up to position t - i.

    Args:
        teacher: the model, with the layers whose hidden states are read.
        net: the layer.
        batch: sequences.
        unrolls: number of unrolls.
        num_tokens: tokens that an entry reads.
        noise: range of uniform noise on the hidden states.
    """
    ids, before = batch.inputs()
    states = torch.cat([sequence_states(batch, name)[0] for name in teacher.layers], -1)
    if noise:
        states = states + noise * (torch.rand_like(states) - 0.5)
    with torch.no_grad():
        at = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        embedding = last_tokens(teacher.model.embedded(ids, at).float(), num_tokens)
    outputs = net(states, embedding, unrolls)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    where = (before - 1).clamp_min(0)
    return [made[row, where] for made in outputs]
