"""Cache policies: positions that a forward pass computes and attends to, and when all keys are
refreshed (``gen.models.targets.cached_masked``).

    policy          computes, between refreshes                refreshes all keys
    none            all positions                              in every forward pass
    prefix          the open block and all behind it           when a block begins
    dual            the open block                             when a block begins
    delayed         masked positions, and those that the last  in the first two passes of a block,
                    pass committed                             and every 8 passes
    delayed_greedy  positions about to be committed, masked    when a block begins, and every
                    ones within ``cache_radius`` of them, and  2 passes
                    those that the last pass committed
    freecache       the open block and all behind it           never
    vicinity        the open block, ``cache_before``           when a block begins, and in the
                    positions before it and ``cache_after``    first ``cache_warmup`` passes
                    behind it
    window          the first ``cache_active`` masked          every 32 passes, and when no masked
                    positions, and those committed since the   position that it sees is left
                    last refresh
    partial         positions that the last refresh announced  every 2 passes, in the first
                                                               ``cache_warmup`` passes, and when a
                                                               block begins

Published as: prefix and dual in Fast-dLLM (arXiv 2505.22618), delayed and delayed_greedy as
dKV-Cache-Decode and dKV-Cache-Greedy (arXiv 2505.15781), freecache as FreeCache (arXiv 2505.21467),
vicinity in dInfer (arXiv 2510.08666), whose code has 0 for all three numbers, window as
Window-Diffusion, partial as ReCAP (arXiv 2505.19089; ``gen.samplers.masked.methods.recap``).

All policies attend to all positions, except ``window``: it attends to the condition, the committed
positions and the first ``cache_window`` masked positions. ``cache_refresh`` is the largest number
of forward passes between refreshes; 0 is the number above, or none. With 1 every policy equals
decoding without a cache (``window`` if it sees all positions).

After a pass has committed a token, the cached keys of its position are still those of the mask
token. ``delayed`` computes such a position once more with its token before it keeps the keys, which
is its delay of one step. ``freecache`` keeps the keys of the positions that end a block for ever;
with ``cache_settle`` it computes them once more. The other policies compute the block until it is
complete and refresh at the next.

``partial`` computes the positions that the scores of the last full pass announced
(``gen.samplers.masked.announced``); so its selector counts and nothing is masked again.

Policies read no distribution, because they run before the forward pass that computes it. So the
block schedule must not read one either, nor the order of ``delayed_greedy``, which has to know the
positions to be committed in advance. Only positions that the pass computed are committed, however
many the schedule asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.params import Params, flag, integer
from gen.core.registry import register, registry
from gen.models.targets.cached_masked import cached
from gen.models.targets.partial import Plan, Slots
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import (
    ANNOUNCED,
    COUNTED,
    LEFT_OUT_LOGP,
    MaskedStep,
    highest,
    needs_of,
)

BLIND_BLOCKS = ("whole", "fixed")  # block schedules that read the canvas alone


@dataclass(frozen=True)
class CacheParams(Params):
    """``cache_refresh``: maximum number of forward passes between refreshes; 0 is the policy's own
    number, or none."""

    cache_refresh: int = integer(0)


@dataclass(frozen=True)
class GreedyCacheParams(CacheParams):
    """``cache_radius``: masked positions on either side of those about to be committed."""

    cache_radius: int = integer(4)


@dataclass(frozen=True)
class FreeCacheParams(CacheParams):
    """``cache_settle``: whether the end of a block is computed once more."""

    cache_settle: bool = flag(False)


@dataclass(frozen=True)
class VicinityParams(CacheParams):
    """``cache_before``, ``cache_after``: positions computed before and after the block.
    ``cache_warmup``: forward passes at the start that compute everything."""

    cache_before: int = integer(16)
    cache_after: int = integer(16)
    cache_warmup: int = integer(4)


def with_cache(target, params):
    """Wrap a target in the cache that the parameter ``cache`` names.

    Args:
        target: masked target; returned as it is for ``none``.
        params: parameters of the masked sampler.

    Raises:
        GenError: the block schedule reads a distribution, the remasker needs a second canvas per
            row, or the target cannot compute a part of its positions.
    """
    policy = registry.get("cache_policy", params.cache, "sampler.cache")
    if policy is none:
        return target
    if params.blocks not in BLIND_BLOCKS:
        expected = (
            f"{' or '.join(BLIND_BLOCKS)}, where cache is {params.cache!r}: it needs the block"
            " before the distribution"
        )
        raise bad_value("sampler.blocks", params.blocks, expected)
    if LEFT_OUT_LOGP in needs_of(registry.get("remasker", params.remasker)):
        raise bad_value(
            "sampler.remasker",
            params.remasker,
            f"one that reads one canvas per row, where cache is {params.cache!r}",
        )
    if ANNOUNCED in needs_of(policy):
        _require_announced(params)
    return cached(target, policy)


def _require_announced(params) -> None:
    """Refuse parts whose next positions are not known ahead. Raises ``GenError``."""
    where = f"where cache is {params.cache!r}: it needs the positions of the next steps"
    counted = [n for n, part in registry.table("selector").items() if COUNTED in needs_of(part)]
    if params.selector not in counted:
        raise bad_value("sampler.selector", params.selector, f"{' or '.join(counted)}, {where}")
    if params.remasker != "none":
        raise bad_value("sampler.remasker", params.remasker, f"none, {where}")


@register("cache_policy", "none")
def none(step: MaskedStep, slots: Slots) -> Plan:
    """Compute all positions in every forward pass."""
    return Plan(
        all_columns(slots),
        all_columns(slots),
        torch.ones_like(slots.steps_since_refresh, dtype=torch.bool),
    )


@register("cache_policy", "prefix", params=CacheParams)
def prefix(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys before the block."""
    return Plan(
        _from_block(step, slots), all_columns(slots), step.is_first_step | is_due(step, slots)
    )


@register("cache_policy", "dual", params=CacheParams)
def dual(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys before and behind the block."""
    return Plan(_open(step, slots), all_columns(slots), step.is_first_step | is_due(step, slots))


@register("cache_policy", "delayed", params=CacheParams)
def delayed(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys of a committed token once they were computed from it."""
    return Plan(
        as_columns(step.masked, slots) | _turned(slots),
        all_columns(slots),
        (step.steps_in_block < 2) | is_due(step, slots, 8),
    )


@register("cache_policy", "delayed_greedy", params=GreedyCacheParams)
def delayed_greedy(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys of all but a few positions.

    Raises:
        GenError: the order reads a distribution.
    """
    if step.params.order not in BLIND:
        raise bad_value(
            "sampler.order",
            step.params.order,
            f"{' or '.join(BLIND)}, where cache is 'delayed_greedy': it needs the order before"
            " the distribution",
        )
    order = registry.get("order", step.params.order)
    soon = highest(order(step), step.masked & step.open, step.quota)
    radius = step.params.cache_radius
    near = (
        torch.nn.functional.max_pool1d(soon[:, None].float(), 2 * radius + 1, 1, radius)[:, 0] > 0
    )
    return Plan(
        as_columns(near & step.masked, slots) | _turned(slots),
        all_columns(slots),
        step.is_first_step | is_due(step, slots, 2),
    )


@register("cache_policy", "freecache", params=FreeCacheParams)
def freecache(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys of complete blocks until the end."""
    compute = _from_block(step, slots)
    if step.params.cache_settle:
        compute = compute | _turned(slots)
    return Plan(compute, all_columns(slots), is_due(step, slots))


@register("cache_policy", "vicinity", params=VicinityParams)
def vicinity(step: MaskedStep, slots: Slots) -> Plan:
    """Keep the keys far from the block."""
    position = _columns(slots) - slots.prefix
    first = step.open.long().argmax(1)[:, None]
    end = step.open.shape[1] - step.open.flip(1).long().argmax(1)[:, None]
    near = (position >= first - step.params.cache_before) & (
        position < end + step.params.cache_after
    )
    return Plan(
        near,
        all_columns(slots),
        step.is_first_step | (step.step_index < step.params.cache_warmup) | is_due(step, slots),
    )


def all_columns(slots: Slots) -> Tensor:
    """Mark all columns of the cache: bool [b, P + T]."""
    return torch.ones_like(slots.written)


def _columns(slots: Slots) -> Tensor:
    return torch.arange(slots.written.shape[1], device=slots.written.device).expand_as(
        slots.written
    )


def as_columns(positions: Tensor, slots: Slots) -> Tensor:
    """Pad positions of the canvas [b, T] to columns [b, P + T] of the cache."""
    return torch.nn.functional.pad(positions, (slots.prefix, 0))


def _open(step: MaskedStep, slots: Slots) -> Tensor:
    """Mark the columns of the open block. Where blocks are counted from the first token of the
    condition, its last tokens may be among them."""
    open = as_columns(step.open, slots)
    if not step.params.align_blocks or step.params.blocks != "fixed":
        return open
    at = _columns(slots) - slots.prefix + step.num_prompt_tokens[:, None]
    return open | (at >= 0) & (at // step.params.block_length == step.memory["block"][:, None])


def _from_block(step: MaskedStep, slots: Slots) -> Tensor:
    return _columns(slots) >= _open(step, slots).long().argmax(1)[:, None]


def _turned(slots: Slots) -> Tensor:
    """Mark the columns whose keys were computed from another token than the current one."""
    return slots.written & ~slots.current


def first_columns(columns: Tensor, count: int) -> Tensor:
    """Keep the first ``count`` true entries of every row."""
    return columns & (columns.long().cumsum(1) <= count)


def is_due(step: MaskedStep, slots: Slots, usual: int = 0) -> Tensor:
    """Decide which rows refresh all keys: bool [b]. ``usual``: the policy's own number of steps."""
    every = step.params.cache_refresh or usual
    return (
        slots.steps_since_refresh + 1 >= every
        if every
        else torch.zeros_like(slots.steps_since_refresh, dtype=torch.bool)
    )
