"""ReCAP: after a full forward pass, a few that compute only the positions committed together.

Steps come in groups of one full forward pass and n local ones, n = ``cache_refresh`` - 1, after
``cache_warmup`` steps that are full throughout:

    full    computes all positions; their scores rank the masked ones, and the group G is what this
            step and the next n commit: m_0 + m_1 + ... + m_n positions, highest score first; the
            first m_0 are committed
    local   computes the positions of G, of which some are committed by now and the rest masked; the
            keys and values of all others, committed or masked, are those of the full pass. Step j
            of the group commits the next m_j positions of the ranking, with tokens drawn anew

With ``cache_condition`` local passes compute the condition too, as the authors' do.

The next positions have to be known: the selector counts (``schedule``, ``even``, ``dream``), and
nothing is masked again. Any order will do, since the group's first step scores all of them. Latents
have the same passes, in encoder and decoder (``gen.models.targets.cached_masked``).

Here the noise on confidences falls from group to group with the schedule of steps, the token
proposed is the one committed, and sampling parameters set the temperature; the authors draw again
before they commit, at a temperature that falls from 1 (``proposer``). Their local passes denoise
latents in fewer steps of the diffusion head.

Reference: Liu et al., "Plug-and-Play Context Feature Reuse for Efficient Masked Generation" (arXiv
2505.19089).
Guarantee: approximate; with ``cache_refresh`` 1, the same sampler without a cache.
Parameters: ``cache_refresh`` (forward passes per group), ``cache_warmup``, ``cache_condition``.
Preset: ``recap``. It draws tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.method import Limit, method
from gen.core.params import flag, integer
from gen.core.registry import register
from gen.models.targets.partial import Plan, Slots
from gen.samplers.masked.parts.caches import CacheParams, all_columns, as_columns
from gen.samplers.masked.step import ANNOUNCED, MaskedStep, needs

MASKGIT_R = {
    "order": "confidence",
    "choice_temperature": 5.5,
    "schedule": "pow",
    "exponent": 2.5,
    "steps": 20,
}


@dataclass(frozen=True)
class PartialParams(CacheParams):
    """``cache_warmup``: forward passes at the start that compute everything. ``cache_condition``:
    whether local forward passes compute the condition too."""

    cache_warmup: int = integer(4)
    cache_condition: bool = flag(False)


@method(
    "recap",
    paper="2505.19089",
    title="Plug-and-Play Context Feature Reuse for Efficient Masked Generation",
    about="ReCAP: full forward passes choose the positions of the next ones, which compute no"
    " others",
    params=MASKGIT_R
    | {"cache": "partial", "cache_refresh": 2, "cache_warmup": 10, "cache_condition": True},
    aliases={"pre_full_iters": "cache_warmup"},
    limit=Limit("maskgit", {"cache_refresh": 1}, MASKGIT_R),
    example={"steps": 6, "cache_warmup": 1},
)
@register("cache_policy", "partial", params=PartialParams)
@needs(ANNOUNCED)
def partial(step: MaskedStep, slots: Slots) -> Plan:
    """Compute the positions that the last full forward pass announced."""
    none = torch.zeros_like(step.masked)
    group = step.recall("group", none)
    num_local = step.recall("num_local", torch.zeros_like(step.rows))
    is_over = ~(group & step.masked & step.open).any(1)
    is_full = step.is_first_step | (num_local == 0) | is_over | (slots.steps_since_refresh < 0)
    group_length = step.params.cache_refresh or 2
    planned = torch.where(step.step_index < step.params.cache_warmup, 0, group_length - 1)
    step.memory.update(is_local=~is_full, num_local=torch.where(is_full, planned, num_local - 1))
    compute = as_columns(group, slots)
    if step.params.cache_condition:
        compute[:, : slots.prefix] = True
    return Plan(compute, all_columns(slots), is_full)
