"""Training data that the recipes share: conditions that are not held out, dropped slots, encoded
datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.modalities.small_language import held_out

UNCONDITIONAL_SHARE = 0.1  # share of conditions dropped whole, for classifier-free guidance


def training_conditions(
    n: int,
    draw: Callable[[], Any],
    accept: Callable[[Any], bool] = lambda condition: True,
) -> list[Any]:
    """Draw ``n`` conditions that are not held out.

    Args:
        n: number of conditions.
        draw: one random condition.
        accept: further filter, called for conditions that are not held out.
    """
    conditions: list[Any] = []
    while len(conditions) < n:
        condition = draw()
        if not held_out(condition) and accept(condition):
            conditions.append(condition)
    return conditions


def drop_mask(
    slots: Tensor, generator: torch.Generator, share: float, required: list[int] | slice
) -> Tensor:
    """Choose slots to drop in training: whole conditions, and single slots that may be omitted.

    Args:
        slots: condition slots [B, P].
        generator: generator of the choice.
        share: share of single slots.
        required: slots that are dropped with their whole condition only.

    Returns:
        bool [B, P], True for dropped slots.
    """
    drop = torch.rand(slots.shape, generator=generator) < share
    drop[:, required] = False
    return drop | (torch.rand(len(slots), 1, generator=generator) < UNCONDITIONAL_SHARE)


def encode_dataset(
    path: Path,
    key: str,
    batches: Iterator[tuple[Tensor, Tensor]],
    count: int,
    chunk: int,
    encode: Callable[[Tensor], Tensor],
    log: Callable[[str], None] = print,
) -> None:
    """Encode media and save them with their condition slots.

    Args:
        path: file to write, a dict of ``key`` and ``slots``.
        key: name of the encoded media, ``codes`` or ``latents``.
        batches: media and condition slots [chunk, P].
        count: media to encode.
        chunk: media per batch.
        encode: media of a batch -> codes or latents [chunk, ...].
        log: receives progress.
    """
    encoded, slots = [], []
    for start, (media, batch_slots) in zip(range(0, count, chunk), batches, strict=False):
        encoded.append(encode(media))
        slots.append(batch_slots)
        if start // chunk % 250 == 0:
            log(f"{start}/{count} encoded")
    torch.save({key: torch.cat(encoded), "slots": torch.cat(slots)}, path)
