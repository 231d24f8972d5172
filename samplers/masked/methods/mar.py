"""MAR: latents in random order, cosine schedule.

A position that is committed gets the end of its denoising path
(``gen.models.adapters.denoising_path``).

Reference: Li et al., "Autoregressive Image Generation without Vector Quantization" (arXiv
2406.11838).
Guarantee: approximate; with one position per forward pass, the model's distribution in that order.
Parameters: ``steps``.
Preset: ``mar``, for models of latents.
"""

from __future__ import annotations

from gen.core.method import SEQUENTIAL, Limit, method

method(
    "mar",
    paper="2406.11838",
    title="Autoregressive Image Generation without Vector Quantization",
    about="MAR: latents in random order, cosine schedule",
    params={"steps": 64, "order": "random", "schedule": "cosine"},
    kinds=("latents",),
    limit=Limit(
        SEQUENTIAL, {"schedule": "linear"}, note="`schedule: linear`, as many `steps` as positions"
    ),
)
