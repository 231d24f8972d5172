"""Window-Diffusion: masked positions far to the right do not exist yet.

    cache ``window``   a forward pass computes the first ``cache_active`` masked positions, and what
                       was committed since the last refresh. It sees the condition, what is
                       committed and the first ``cache_window`` masked positions. All is computed
                       anew every 32 forward passes (``cache_refresh``), and when no masked position
                       that it sees is left

The authors also stop at the eos token, where there is one (``stop`` = ``end``).

Reference: Window-Diffusion (arXiv 2601.20332).
Guarantee: approximate.
Parameters: ``cache_window``, ``cache_active``, ``cache_refresh`` (a window of all positions and a
refresh of 1: ``llada`` without blocks).
Preset: ``window_diffusion``, without blocks; for models that can compute some of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.method import Limit, method
from gen.core.params import integer
from gen.core.registry import register
from gen.models.targets.partial import Plan, Slots
from gen.samplers.masked.parts.caches import CacheParams, as_columns, first_columns, is_due
from gen.samplers.masked.parts.selection import greedy
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class WindowParams(CacheParams):
    """``cache_window``: masked positions that a forward pass sees. ``cache_active``: masked
    positions that it computes."""

    cache_window: int = integer(64, least=1)
    cache_active: int = integer(16, least=1)


@method(
    "window_diffusion",
    paper="2601.20332",
    title="Window-Diffusion",
    about="Window-Diffusion: leaves distant masked positions out and computes only the first of"
    " the near ones; no blocks",
    params=greedy(
        selector="even",
        steps=256,
        cache="window",
        cache_window=64,
        cache_active=16,
        cache_refresh=32,
    ),
    limit=Limit(
        "llada",
        {"cache_refresh": 1},
        {"blocks": "whole", "steps": 256},
        "a window of all positions, `cache_refresh: 1`",
    ),
)
@register("cache_policy", "window", params=WindowParams)
def window(step: MaskedStep, slots: Slots) -> Plan:
    """Computes the first masked positions of those that it sees."""
    masked = as_columns(step.masked, slots)
    waiting = masked & slots.written
    refresh = is_due(step, slots, 32) | ~waiting.any(1)
    seen = ~masked | first_columns(masked, step.params.cache_window)
    committed = slots.written & slots.changed & ~masked
    return Plan(
        first_columns(waiting, step.params.cache_active) | committed,
        torch.where(refresh[:, None], seen, slots.written),
        refresh,
    )
