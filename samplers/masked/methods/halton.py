"""Halton scheduler: positions that are committed together lie far apart.

It is the order ``halton``, a low-discrepancy sequence over the grid
(``gen.samplers.masked.parts.orders``), with the schedule ``arccos``.

Reference: Besnier et al., "Halton Scheduler For Masked Generative Image Transformer" (arXiv
2503.17076).
Guarantee: approximate; with one position per forward pass, the model's distribution in that order.
Parameters: ``steps``.
Preset: ``halton``. It draws tokens.
"""

from __future__ import annotations

from gen.core.method import SEQUENTIAL, Limit, method

method(
    "halton",
    paper="2503.17076",
    title="Halton Scheduler For Masked Generative Image Transformer",
    about="Halton scheduler: low-discrepancy order",
    params={"order": "halton", "schedule": "arccos"},
    limit=Limit(
        SEQUENTIAL,
        {"schedule": "linear"},
        note="`schedule: linear`, as many `steps` as positions: then the model's distribution in"
        " that order",
    ),
)
