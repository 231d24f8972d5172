"""Cache policies: which places a call computes, which it looks at, and when all is computed anew
(``gen.models.targets.cached_masked``).

    policy          computes, in an ordinary call              starts anew
                    published as
    none            everything                                 every call
    prefix          the open block and what is behind it       a block begins
                    Fast-dLLM (arXiv 2505.22618)
    dual            the open block                             a block begins
                    Fast-dLLM
    delayed         what is empty, and what was committed by   a block begins, every 8 calls
                    dKV-Cache-Decode (arXiv 2505.15781) the last call
    delayed_greedy  what is to be committed now, empty places  a block begins, every 2 calls
                    dKV-Cache-Greedy within ``cache_radius`` of it, and what was committed by the
                    last call
    freecache       the open block and what is behind it       never
                    FreeCache (arXiv 2505.21467)
    vicinity        the open block, ``cache_before`` places    a block begins, and in the first
                    dInfer (arXiv 2510.08666) before it and ``cache_after`` behind it
                    ``cache_warmup`` calls
    window          the first ``cache_active`` empty places,   every 32 calls, and when no empty
                    Window-Diffusion and what was committed since it started    place that it sees
                    is left anew

All of them look at everything, but for ``window``, to which the condition, what is committed and
the first ``cache_window`` empty places are all there is. ``cache_refresh``: calls from one start to
the next at most; 0 is the number above, or none. With 1 each of them is decoding without a cache
(``window`` if it sees all places).

When a call has committed an id, the keys of its place are those of an empty one. ``delayed``
computes such a place once more, as what it has become, before it is left alone, which is its delay
of one step. ``freecache`` leaves the places that end a block as they are, for ever; with
``cache_settle`` they are computed once more. The others compute the block until it is over and
start anew with the next.

Policies look at no law: it is what they are about to have computed. So the block schedule must not
need one either, nor the order of ``delayed_greedy``, which has to know what is to be committed now.
Only places that the call computed are committed, however many the schedule asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.params import Params, flag, integer
from gen.core.registry import register, registry
from gen.models.targets.cached_masked import Plan, Slots, cached
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import LEFT_OUT_LOGP, MaskedStep, highest, needs_of

BLIND_BLOCKS = ("whole", "fixed")  # block schedules that look at the canvas alone


@dataclass(frozen=True)
class CacheParams(Params):
    """``cache_refresh``: forward passes from one refresh to the next at most; 0 is the policy's own
    number, or none."""

    cache_refresh: int = integer(0)


@dataclass(frozen=True)
class GreedyCacheParams(CacheParams):
    """``cache_radius``: masked positions on either side of what is to be committed."""

    cache_radius: int = integer(4)


@dataclass(frozen=True)
class FreeCacheParams(CacheParams):
    """``cache_settle``: positions that end a block are computed once more."""

    cache_settle: bool = flag(False)


@dataclass(frozen=True)
class VicinityParams(CacheParams):
    """``cache_before``, ``cache_after``: positions around the block. ``cache_warmup``: forward
    passes at the start that compute everything."""

    cache_before: int = integer(16)
    cache_after: int = integer(16)
    cache_warmup: int = integer(4)


def with_cache(target, params):
    """The target that the knob ``cache`` asks for: the same one without a cache. Raises
    ``GenError`` for a block schedule that looks at a law, for a remasker that asks for the law of
    places without their own ids, and for a target that cannot compute some of its places.
    """
    policy = registry.get("cache_policy", params.cache, "sampler.cache")
    if policy is none:
        return target
    if params.blocks not in BLIND_BLOCKS:
        expected = (
            f"{' or '.join(BLIND_BLOCKS)}, where cache is {params.cache!r}: it needs the block"
            " before the law"
        )
        raise bad_value("sampler.blocks", params.blocks, expected)
    if LEFT_OUT_LOGP in needs_of(registry.get("remasker", params.remasker)):
        raise bad_value(
            "sampler.remasker",
            params.remasker,
            f"one that looks at one canvas per row, where cache is {params.cache!r}",
        )
    return cached(target, policy)


@register("cache_policy", "none")
def none(step: MaskedStep, slots: Slots) -> Plan:
    """Everything, every call."""
    return Plan(
        _all(slots), _all(slots), torch.ones_like(slots.steps_since_refresh, dtype=torch.bool)
    )


@register("cache_policy", "prefix", params=CacheParams)
def prefix(step: MaskedStep, slots: Slots) -> Plan:
    """What stands before the block is kept."""
    return Plan(_from_block(step, slots), _all(slots), step.is_first_step | is_due(step, slots))


@register("cache_policy", "dual", params=CacheParams)
def dual(step: MaskedStep, slots: Slots) -> Plan:
    """What stands before the block and what stands behind it is kept."""
    return Plan(_open(step, slots), _all(slots), step.is_first_step | is_due(step, slots))


@register("cache_policy", "delayed", params=CacheParams)
def delayed(step: MaskedStep, slots: Slots) -> Plan:
    """What is committed is kept, as soon as it was computed as that."""
    return Plan(
        as_columns(step.masked, slots) | _turned(slots),
        _all(slots),
        step.is_first_step | is_due(step, slots, 8),
    )


@register("cache_policy", "delayed_greedy", params=GreedyCacheParams)
def delayed_greedy(step: MaskedStep, slots: Slots) -> Plan:
    """All but a few places is kept. Raises ``GenError`` for an order that looks at a law."""
    if step.params.order not in BLIND:
        raise bad_value(
            "sampler.order",
            step.params.order,
            f"{' or '.join(BLIND)}, where cache is 'delayed_greedy': it needs the order before"
            " the law",
        )
    order = registry.get("order", step.params.order)
    soon = highest(order(step), step.masked & step.open, step.quota)
    radius = step.params.cache_radius
    near = (
        torch.nn.functional.max_pool1d(soon[:, None].float(), 2 * radius + 1, 1, radius)[:, 0] > 0
    )
    return Plan(
        as_columns(near & step.masked, slots) | _turned(slots),
        _all(slots),
        step.is_first_step | is_due(step, slots, 2),
    )


@register("cache_policy", "freecache", params=FreeCacheParams)
def freecache(step: MaskedStep, slots: Slots) -> Plan:
    """Blocks that are over are kept for ever."""
    compute = _from_block(step, slots)
    if step.params.cache_settle:
        compute = compute | _turned(slots)
    return Plan(compute, _all(slots), is_due(step, slots))


@register("cache_policy", "vicinity", params=VicinityParams)
def vicinity(step: MaskedStep, slots: Slots) -> Plan:
    """What is far from the block is kept."""
    position = _columns(slots) - slots.prefix
    first = step.open.long().argmax(1)[:, None]
    end = step.open.shape[1] - step.open.flip(1).long().argmax(1)[:, None]
    near = (position >= first - step.params.cache_before) & (
        position < end + step.params.cache_after
    )
    return Plan(
        near,
        _all(slots),
        step.is_first_step | (step.step_index < step.params.cache_warmup) | is_due(step, slots),
    )


def _all(slots: Slots) -> Tensor:
    return torch.ones_like(slots.written)


def _columns(slots: Slots) -> Tensor:
    return torch.arange(slots.written.shape[1], device=slots.written.device).expand_as(
        slots.written
    )


def as_columns(positions: Tensor, slots: Slots) -> Tensor:
    """Places of the canvas [b, T] as columns [b, P + T]."""
    return torch.nn.functional.pad(positions, (slots.prefix, 0))


def _open(step: MaskedStep, slots: Slots) -> Tensor:
    """The columns of the open block. Where blocks are counted from the first id of the condition,
    its last ids may be among them."""
    open = as_columns(step.open, slots)
    if not step.params.align_blocks or step.params.blocks != "fixed":
        return open
    at = _columns(slots) - slots.prefix + step.num_prompt_tokens[:, None]
    return open | (at >= 0) & (at // step.params.block_length == step.memory["block"][:, None])


def _from_block(step: MaskedStep, slots: Slots) -> Tensor:
    return _columns(slots) >= _open(step, slots).long().argmax(1)[:, None]


def _turned(slots: Slots) -> Tensor:
    """Columns whose keys were computed from another id than now stands there."""
    return slots.written & ~slots.current


def first_columns(columns: Tensor, count: int) -> Tensor:
    """The first so many of the columns that are true."""
    return columns & (columns.long().cumsum(1) <= count)


def is_due(step: MaskedStep, slots: Slots, usual: int = 0) -> Tensor:
    """Whether it is time to start anew: bool [b]."""
    every = step.params.cache_refresh or usual
    return (
        slots.steps_since_refresh + 1 >= every
        if every
        else torch.zeros_like(slots.steps_since_refresh, dtype=torch.bool)
    )
