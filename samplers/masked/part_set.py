"""Parts of a masked sampler: the functions and objects that its parameters name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.registry import registry
from gen.core.token_space import TokenSpace
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.step import (
    HIDDEN_STATES,
    LEFT_OUT_LOGP,
    LIKELIEST,
    LOGPROBS,
    ON_HOST,
    ROUNDED_UP,
    MaskedStep,
    needs_of,
)


@dataclass(frozen=True)
class Revision:
    """Outcome of a remasker.

    Attributes:
        removed: positions to mask again, bool [b, T].
        count: positions to commit in this step, long [b].
        replaced: tokens to write over committed ones, long [b, T], -1 where none; None for none.
        again: rows that want another step of their block though it is full, bool [b]; None for
            none.
    """

    removed: Tensor
    count: Tensor
    replaced: Tensor | None = None
    again: Tensor | None = None


@dataclass(frozen=True)
class PartSet:
    """Parts of one call of a sampler; ``samplers.masked.loop`` says what each of them returns.

    Attributes:
        revises: whether the remasker may mask or change what earlier steps committed.
        remasker_reads_left_out: whether the forward pass has one more canvas per committed
            position of the block, with that position masked.
        blocks_read_logprobs: whether the block schedule runs after the forward pass.
        masks_rounded_up: whether the schedule's number of masked positions is rounded up.
        takes_likeliest: whether the proposer takes the likeliest token and draws none.
        reads_states: whether the proposer reads hidden states.
        captures: whether no part reads values on the host.
    """

    order: Callable[[MaskedStep], Tensor]
    schedule: Callable[[Tensor, float], Tensor]
    proposer: Callable[[MaskedStep], Tensor]
    selector: Callable[[MaskedStep], Tensor]
    remasker: Callable[[MaskedStep, Tensor], tuple]
    stop: Callable[[MaskedStep, Tensor], tuple[Tensor, Tensor]]
    blocks: Callable[[MaskedStep], tuple]
    revises: bool
    remasker_reads_left_out: bool
    blocks_read_logprobs: bool
    masks_rounded_up: bool
    takes_likeliest: bool
    reads_states: bool
    captures: bool


def make_parts(
    params: MaskedSampler,
    space: TokenSpace,
    device: torch.device | str,
    overrides: Mapping[str, Callable],
) -> PartSet:
    """Look up the parts that a sampler's parameters name.

    Args:
        params: the sampler.
        space: token space of the canvas.
        device: device of the weights of parts that have some.
        overrides: parts by the parameter that names them, used in place of the named ones.
    """

    def part(name: str, kind: str) -> Any:
        found = overrides.get(name) or registry.get(kind, getattr(params, name))
        # a class has weights, which are read once per call of the sampler
        return found(params, device) if isinstance(found, type) else found

    remasker, blocks = part("remasker", "remasker"), part("blocks", "block_schedule")
    schedule, proposer = part("schedule", "schedule"), part("proposer", "proposer")
    default_order = "random" if space.channels else "confidence"
    order: Any = registry.get("order", params.order or default_order)
    selector, stop = part("selector", "selector"), part("stop", "stop")
    every = (order, schedule, proposer, selector, remasker, stop, blocks)
    return PartSet(
        order=order,
        schedule=schedule,
        proposer=proposer,
        selector=selector,
        remasker=remasker,
        stop=stop,
        blocks=blocks,
        revises=params.remasker != "none" or "remasker" in overrides,
        remasker_reads_left_out=LEFT_OUT_LOGP in needs_of(remasker),
        blocks_read_logprobs=LOGPROBS in needs_of(blocks),
        masks_rounded_up=ROUNDED_UP in needs_of(schedule),
        takes_likeliest=LIKELIEST in needs_of(proposer),
        reads_states=HIDDEN_STATES in needs_of(proposer),
        captures=not overrides and not any(ON_HOST in needs_of(part) for part in every),
    )
