"""Toy languages with a history: ids that must add up to a length, rows that end, and their
distributions from the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from tabular import EMPTY, PROMPTS

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace


class ExactLength:
    """Ids of the lengths 1, 2, ... add up to ``total``; the last id is the end, and comes when they
    do."""

    def __init__(self, ids: int, total: int):
        self.size, self.total = torch.arange(1, ids + 2), total
        self.size[-1] = 0

    def legal(self, history, positions):
        upto = torch.nn.functional.pad(self.size[history].cumsum(1), (1, 0))
        left = self.total - upto.gather(1, positions)[..., None]
        fits = self.size <= left
        fits[..., -1:] = left <= 0
        return fits


def exact_length(positions: int, total: int, ids: int = 3) -> TokenSpace:
    return replace(
        TokenSpace.codes((positions,), ids + 1, ids + 1),
        constraint=ExactLength(ids, total),
        eos_token_id=ids,
    )


def with_end(positions: int, ids: int = 3) -> TokenSpace:
    """The last id is the end, and may come anywhere."""
    return replace(TokenSpace.codes((positions,), ids, ids), eos_token_id=ids - 1)


SPACES = {"length": exact_length(4, 4), "length_with_room": exact_length(4, 3), "end": with_end(4)}


def follow(space: TokenSpace, before: tuple[int, ...]) -> set[int]:
    """What may follow, from the definition."""
    if space.eos_token_id in before:
        return {space.eos_token_id}
    if space.constraint is None:
        return set(range(space.vocab_size))
    left = space.constraint.total - sum(i + 1 for i in before)
    return {i for i in range(space.vocab_size - 1) if i + 1 <= left} or {space.eos_token_id}


def obeys(space: TokenSpace, ids: list[int]) -> bool:
    return all(x in follow(space, tuple(ids[:n])) for n, x in enumerate(ids))


def ends_at(ids: list[int], end: int) -> int:
    """Places up to and including the end."""
    return ids.index(end) + 1 if end in ids else len(ids)


def sampling_of(
    model, space: TokenSpace, sampling: SamplingParams, context: int, given: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The distribution of what follows ``given``, place after place."""

    def extend(before: tuple[int, ...], mass: float, out: dict) -> dict:
        if len(before) == space.length:
            out[before[len(given) :]] = mass
            return out
        legal = torch.tensor([x in follow(space, before) for x in range(space.vocab_size)])
        cond = model.after([*PROMPTS[context], *before])
        uncond = model.after([*EMPTY[context], *before]) if sampling.guided else None
        for token, p in enumerate(sampling(cond, uncond, legal).exp().tolist()):
            if p > 0:
                extend((*before, token), mass * p, out)
        return out

    return extend(given, 1.0, {})
