"""Fast-dLLM: all positions above a confidence, or as many as are confident together.

    selector ``threshold``   c_i >= ``conf_threshold`` (``gen.samplers.masked.parts.selectors``)
    selector ``factor``      the n positions of highest c, n the largest with (n + 1)(1 - c_(n)) <
                             ``factor``, c_(n) the n-th highest (section 3.3)

Its caches are ``prefix`` and ``dual`` (``gen.samplers.masked.parts.caches``).

Reference: Wu et al., "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache
and Parallel Decoding" (arXiv 2505.22618).
Guarantee: approximate.
Parameters: ``conf_threshold`` (above 1: one position per forward pass), ``factor`` (0: the same).
Presets: ``fast_dllm`` and ``fast_dllm_factor``, with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep, ranked

TITLE = (
    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel"
    " Decoding"
)


@dataclass(frozen=True)
class FactorParams(Params):
    """``factor``: bound on (n + 1)(1 - c) of n positions that are committed together."""

    factor: float = number(1.0)


@method(
    "fast_dllm_factor",
    paper="2505.22618",
    title=TITLE,
    about="Fast-dLLM: a threshold that rises with the number of positions",
    params=greedy(selector="factor", factor=1.0, **fixed_blocks()),
    limit=Limit(SEQUENTIAL, {"factor": 0}),
)
@register("selector", "factor", params=FactorParams)
def factor(step: MaskedStep) -> Tensor:
    """Selects more positions only if the least confident of them is more confident."""
    number = ranked(step.confidence, step.eligible) + 1
    return step.eligible & ((number + 1) * (1 - step.confidence) < step.params.factor)


method(
    "fast_dllm",
    paper="2505.22618",
    title=TITLE,
    about="Fast-dLLM: all positions above a confidence threshold",
    params=greedy(selector="threshold", conf_threshold=0.9, **fixed_blocks()),
    limit=Limit(SEQUENTIAL, {"conf_threshold": 1.1}),
)
