"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gen.core.errors import GenError, Interrupt
    from gen.core.registry import registry
    from gen.interop.diffusers import diffusers_pipeline
    from gen.interop.transformers import transformers_generate
    from gen.pipeline.pipeline import Pipeline, load
    from gen.play.world import World, load_world

    __version__: str

# torch, transformers and diffusers are heavy: names are imported when they are asked for
_LAZY = {
    "GenError": "gen.core.errors",
    "Interrupt": "gen.core.errors",
    "Pipeline": "gen.pipeline.pipeline",
    "World": "gen.play.world",
    "diffusers_pipeline": "gen.interop.diffusers",
    "load": "gen.pipeline.pipeline",
    "load_world": "gen.play.world",
    "registry": "gen.core.registry",
    "transformers_generate": "gen.interop.transformers",
}
__all__ = [
    "GenError",
    "Interrupt",
    "Pipeline",
    "World",
    "__version__",
    "diffusers_pipeline",
    "load",
    "load_world",
    "registry",
    "transformers_generate",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for."""
    if name == "__version__":
        from gen.core.versions import gen_version  # reads the metadata of the installed package

        return gen_version()
    if name not in _LAZY:
        raise AttributeError(f"module 'gen' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """List the public names, without the packages that happen to be imported."""
    return sorted(__all__)
