"""dParallel: all positions below an entropy.

    committed   positions i with H_i <= ``entropy_bound``, H_i the entropy of p_i

Reference: "dParallel: Learnable Parallel Decoding for dLLMs" (arXiv 2509.26488). The paper trains a
model for it; this is how it decodes.
Guarantee: approximate.
Parameters: ``entropy_bound``, in nats (0: one position per forward pass, and all that are certain);
the authors' code calls it a threshold.
Preset: ``dparallel``, with blocks of 32.
"""

from __future__ import annotations

from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.parts.selection import EntropyParams, fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep


@method(
    "dparallel",
    paper="2509.26488",
    title="dParallel: Learnable Parallel Decoding for dLLMs",
    about="dParallel: all positions below an entropy threshold",
    params=greedy(selector="entropy", order="entropy", entropy_bound=0.5, **fixed_blocks()),
    aliases={"threshold": "entropy_bound"},
    limit=Limit(
        SEQUENTIAL,
        {"entropy_bound": 0},
        note="`entropy_bound: 0`; certain positions come together",
    ),
)
@register("selector", "entropy", params=EntropyParams)
def entropy(step: MaskedStep) -> Tensor:
    """Selects all positions whose distribution has low entropy."""
    return step.eligible & (-certainty(step) <= step.params.entropy_bound)
