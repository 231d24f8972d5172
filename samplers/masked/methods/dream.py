"""Dream: the same number of positions in every step, least entropy first.

It is the selector ``schedule`` with schedule ``linear`` and order ``entropy``, without blocks; the
authors' other orders are ``confidence`` and ``margin``.

Reference: Ye et al., "Dream 7B: Diffusion Large Language Models" (arXiv 2508.15487), who draw at
temperature 0.2 and top-p 0.95.
Guarantee: approximate.
Parameters: ``steps`` (as many as positions: one position per forward pass).
Preset: ``dream``. It draws tokens.
"""

from __future__ import annotations

from gen.core.method import SEQUENTIAL, Limit, method
from gen.samplers.masked.parts.selection import GREEDY

method(
    "dream",
    paper="2508.15487",
    title="Dream 7B: Diffusion Large Language Models",
    about="Dream: equally many positions in every step, least entropy first; no blocks. Published"
    " at temperature 0.2, top-p 0.95",
    params=GREEDY
    | {
        "selector": "schedule",
        "schedule": "linear",
        "order": "entropy",
        "steps": 512,
        "proposer": "categorical",
        "confidence_on": "shaped",
    },
    limit=Limit(SEQUENTIAL, note="as many `steps` as positions"),
)
