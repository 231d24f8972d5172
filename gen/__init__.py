"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gen.pipeline.pipeline import Pipeline

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
    """Import the names that need torch, transformers or diffusers when they are asked for."""
    if name == "__version__":
        from gen.core.versions import gen_version  # reads the metadata of the installed package

        return gen_version()
    if name not in LAZY:
        raise AttributeError(f"module 'gen' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    """Names of the public interface."""
    return sorted({"load", "__version__", *LAZY})
