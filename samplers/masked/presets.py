"""Presets of the published parallel decoders of masked language models: a paper's name, and the
parts and knobs that it stands for.

All but ``dream`` propose the likeliest id and read confidence from the model's own probabilities
(temperature 0, as these papers decode): the law's temperature and filters change nothing, its
guidance and what is legal do. ``proposer`` = ``categorical`` draws instead. Blocks have
``block_length`` places, 32 unless it says otherwise; a canvas that is shorter is one block. The
knobs are the authors' defaults, or those of their scripts where the code has none.
"""

from __future__ import annotations

from typing import Any

from gen.core.registry import register
from gen.core.sampler import Preset

SUREST = {
    "proposer": "argmax",
    "confidence_on": "raw",
    "order": "confidence",
    "choice_temperature": 0.0,
}
BLOCKS = {"blocks": "fixed", "block_length": 32}


def preset(
    name: str, paper: str, about: str, parts: dict[str, Any], aliases: dict[str, str] | None = None
) -> None:
    """Registers parts and knobs under a paper's name. ``paper``: its arXiv number."""
    register("preset", name)(
        Preset(
            name,
            "masked_iterative",
            SUREST | parts,
            about=about,
            aliases=aliases or {},
            paper=paper,
        )
    )


preset(
    "llada",
    "2502.09992",
    "LLaDA: as many places in every step, the surest first",
    {"selector": "even", "steps": 128} | BLOCKS,
)
preset(
    "dream",
    "2508.15487",
    "Dream: the same number in every step, least entropy first; no blocks. Its authors draw at"
    " temperature 0.2, top-p 0.95",
    {
        "selector": "schedule",
        "schedule": "linear",
        "order": "entropy",
        "steps": 512,
        "proposer": "categorical",
        "confidence_on": "shaped",
    },
)
preset(
    "fast_dllm",
    "2505.22618",
    "Fast-dLLM: all places above a confidence",
    {"selector": "threshold", "conf_threshold": 0.9} | BLOCKS,
)
preset(
    "fast_dllm_factor",
    "2505.22618",
    "Fast-dLLM: the more places, the surer they must be",
    {"selector": "factor", "factor": 1.0} | BLOCKS,
)
preset(
    "eb",
    "2505.24857",
    "EB-Sampler: a bound on the entropy that is committed at once",
    {"selector": "entropy_bound", "order": "entropy", "entropy_bound": 0.001} | BLOCKS,
)
preset(
    "dparallel",
    "2509.26488",
    "dParallel: all places below an entropy",
    {"selector": "entropy", "order": "entropy", "entropy_bound": 0.5} | BLOCKS,
    aliases={"threshold": "entropy_bound"},
)  # what its code calls a threshold
preset(
    "localleap",
    "2510.07081",
    "LocalLeap: a lower threshold around sure places",
    {"selector": "local", "conf_threshold": 0.9, "low_threshold": 0.75, "radius": 4} | BLOCKS,
)
preset(
    "hierarchy",
    "2510.08666",
    "dInfer's hierarchical decoder: the surest place of every gap, and all above a confidence",
    {"selector": "runs", "conf_threshold": 0.9, "low_threshold": 0.4} | BLOCKS,
)
preset(
    "r2",
    "2604.18995",
    "R2-dLLM: what its neighbours or its past already tell",
    {"selector": "regions", "conf_threshold": 0.9, "low_threshold": 0.8, "history": 3} | BLOCKS,
)
preset(
    "ete",
    "",
    "after ETE: sure places of this block and the next, and an uncertain one where these are few",
    {"selector": "explore", "conf_threshold": 0.9, "blocks": "lookahead", "block_length": 32},
)
preset(
    "klass",
    "2511.05664",
    "KLASS: sure places whose law no longer moves; blocks of 64",
    {
        "selector": "klass",
        "conf_threshold": 0.9,
        "kl_threshold": 0.01,
        "history": 2,
        "blocks": "fixed",
        "block_length": 64,
    },
)
preset(
    "ccd",
    "2512.02044",
    "CCD: places among the best with the same id step after step; no blocks",
    {"selector": "coherent", "order": "entropy", "history": 2, "buffer_size": 4},
)
preset(
    "credit",
    "2510.06133",
    "CreditDecoding: what was likely in earlier steps gains",
    {
        "selector": "threshold",
        "proposer": "credit",
        "conf_threshold": 0.9,
        "credit_weight": 0.7,
        "credit_decay": 0.8,
        "credit_power": 0.2,
    }
    | BLOCKS,
)
preset(
    "pc",
    "2508.13021",
    "PC-Sampler: rare ids and early places first; no blocks; for models that say how rare their"
    " ids are",
    {"selector": "even", "order": "position", "position_decay": 0.25, "steps": 256},
)
