"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gen.media import torchaudio_compat

if TYPE_CHECKING:
    from gen.pipeline.pipeline import Pipeline

# a torchaudio that cannot load must not take transformers and diffusers down with it
torchaudio_compat.ensure()

LAZY = {
    "transformers_generate": "gen.interop.transformers",
    "diffusers_pipeline": "gen.interop.diffusers",
}


def load(
    modality: str,
    model: Any = None,
    *,
    device: Any = "cpu",
    dtype: Any = "float32",
    **options: Any,
) -> Pipeline:
    """Return a pipeline for a modality; see ``gen.pipeline.pipeline.load``."""
    # torch is heavy: it is imported with the first pipeline
    from gen.pipeline.pipeline import load as load_pipeline

    return load_pipeline(modality, model, device=device, dtype=dtype, **options)


def __getattr__(name: str) -> Any:
    """Import the names that need transformers or diffusers when they are asked for."""
    if name not in LAZY:
        raise AttributeError(f"module 'gen' has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)
