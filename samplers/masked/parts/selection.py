"""Selection helpers: confident positions, runs, groups and tokens that stay the same.

A threshold is reached by what is equal to it. Distances and runs go along the sequence, also on a
grid, as in the papers. Positions of other blocks do not count. Of ties, the first position wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.params import Params, integer, number
from gen.samplers.masked.step import MaskedStep, highest

# What most presets of masked language models share: the likeliest token, and the confidence of the
# model's own distribution (temperature 0, as these papers decode). Temperature and filters then
# change nothing; guidance and the allowed tokens do.
GREEDY: dict[str, Any] = {
    "proposer": "argmax",
    "confidence_on": "raw",
    "order": "confidence",
    "choice_temperature": 0.0,
}
# so many steps that the schedule never asks for more than one position
PATIENT: dict[str, Any] = {"schedule": "linear", "steps": 1024}


def greedy(**params: Any) -> dict[str, Any]:
    """Adds the parameters of a preset to ``GREEDY``."""
    return GREEDY | params


def fixed_blocks(length: int = 32) -> dict[str, Any]:
    """Parameters of fixed blocks. A canvas that is shorter is one block."""
    return {"blocks": "fixed", "block_length": length}


@dataclass(frozen=True)
class ThresholdParams(Params):
    """``conf_threshold``: confidence from which a position is confident."""

    conf_threshold: float = number(0.9)


@dataclass(frozen=True)
class TwoThresholdParams(ThresholdParams):
    """``low_threshold``: lower confidence threshold, which applies to some positions."""

    low_threshold: float = number(0.6)


@dataclass(frozen=True)
class EntropyParams(Params):
    """``entropy_bound``: bound on the entropy, in nats."""

    entropy_bound: float = number(0.1)


@dataclass(frozen=True)
class HistoryParams(Params):
    """``history``: number of forward passes for which a condition must hold."""

    history: int = integer(2, least=1)


@dataclass(frozen=True)
class RemaskThresholdParams(Params):
    """``remask_threshold``: probability below which a committed token is doubtful."""

    remask_threshold: float = number(0.3, most=1.0)


def confident(step: MaskedStep) -> Tensor:
    """Finds eligible positions whose confidence reaches ``conf_threshold``: bool [b, T]."""
    return step.eligible & (step.confidence >= step.params.conf_threshold)


def confident_or_best(step: MaskedStep) -> Tensor:
    """Finds the confident positions, or else the position of highest score: bool [b, T]."""
    chosen = confident(step)
    return torch.where(chosen.any(1, keepdim=True), chosen, best(step))


def best(step: MaskedStep) -> Tensor:
    """Finds the eligible position of highest score of each row: bool [b, T]."""
    return highest(step.score, step.eligible, torch.ones_like(step.rows))


def runs_of(among: Tensor, ids: Tensor | None = None) -> Tensor:
    """Numbers the runs of adjacent positions from 1 on: long [b, T].

    Args:
        among: the positions that form runs, bool [b, T]. The numbers of others mean nothing.
        ids: tokens [b, T]; a run then holds the same one throughout.
    """
    begins = among.clone()
    same = among[:, :-1] if ids is None else among[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    begins[:, 1:] &= ~same
    return begins.long().cumsum(1)


def best_of_each(value: Tensor, among: Tensor, group: Tensor) -> Tensor:
    """Finds the first position of highest ``value`` in each ``group`` (long [b, T], at most T), of
    the positions in ``among``: bool [b, T]."""
    total = value.shape[1]
    position = torch.arange(total, device=value.device).expand_as(group)
    value = value.masked_fill(~among, -torch.inf)
    top = value.new_full((len(value), total + 1), -torch.inf).scatter_reduce(
        1, group, value, "amax"
    )
    ties = among & (value == top.gather(1, group))
    first = position.new_full((len(value), total + 1), total).scatter_reduce(
        1, group, torch.where(ties, position, total), "amin"
    )
    return ties & (position == first.gather(1, group))


def steps_unchanged(step: MaskedStep, name: str, among: Tensor) -> Tensor:
    """Counts for how many steps of the block, this one included, each position has been in
    ``among`` (bool [b, T]) with the same token proposed: long [b, T]. ``name``: key of what is
    remembered."""
    nothing = torch.full_like(step.proposed_tokens, -1)
    before = torch.where(step.is_first_step[:, None], nothing, step.recall(f"{name}_ids", nothing))
    count = step.recall(f"{name}_count", torch.zeros_like(nothing))
    count = torch.where(step.proposed_tokens == before, count, 0) + 1
    step.memory.update(
        {f"{name}_ids": torch.where(among, step.proposed_tokens, -1), f"{name}_count": count}
    )
    return torch.where(among, count, 0)


def recommit(step: MaskedStep, removed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Commits as many more positions as are ``removed`` (bool [b, T]); in the last step, none.
    ``count`` [b]: those that the selector commits."""
    return removed, torch.where(step.is_last_step, count, count + removed.sum(1))
