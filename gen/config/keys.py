"""Keys of a job file and their defaults."""

from __future__ import annotations

from typing import Any

from gen.config.run import RUN
from gen.core.edit_spec import EDIT_FIELDS, MEDIA

DEFAULTS: dict[str, Any] = {
    "modality": None,
    "model": None,
    "model_options": {},
    "sampler": {},  # the modality or the model decides (``gen.contracts.defaults``)
    "sampling": {},
    "prompts": None,
    "prompts_file": None,
    "prompts_dataset": None,
    "prompt_column": None,
    "num_samples": 1,
    "seed": 0,
    **dict.fromkeys(EDIT_FIELDS),
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "batch_size": 8,
    "trace": 1,
    "format": None,
}
FOLDER_KEYS = ("name", "out", *RUN)  # one folder per run, so these are no keys of an entry
KEYS = (*FOLDER_KEYS, *DEFAULTS, "sweep", "jobs")
FILES = ("prompts_file", *MEDIA)
NODES = ("sampler", "sampling", "model_options")  # keys with keys of their own
RUN_NODE = "engine_options"
PROMPTS = ("prompts", "prompts_file", "prompts_dataset")  # one of them gives the rows


def depth_of(key: str) -> float:
    """Return how many keys lead to a value below a key of an entry: those of a sampler and of a
    model have keys of their own, such as ``sampler.base.steps`` and
    ``model_options.adapters.poet``."""
    return 2 if key == "sampling" else float("inf") if key in NODES else 1
