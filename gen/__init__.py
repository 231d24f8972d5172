"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from pathlib import Path

_root = Path(__file__).parents[1]
if (
    _root / "pyproject.toml"
).is_file():  # a checkout keeps samplers/, tokenizers/, modalities/ and configs/ beside gen/
    __path__.insert(0, str(_root))  # a wheel holds them inside it

from gen import audio_compat  # noqa: E402 - after the path

# a torchaudio that cannot load must not take transformers and diffusers down with it
audio_compat.ensure()


def load(modality, model=None, *, device="cpu", dtype="float32", **options):
    """A pipeline for a modality; see ``gen.pipeline``, which this imports (and torch with it) on
    the first call."""
    from gen.pipeline import load as _load

    return _load(modality, model, device=device, dtype=dtype, **options)


def __getattr__(name):
    """What imports transformers or diffusers comes when it is asked for."""
    homes = {
        "transformers_generate": "gen.transformers_call",
        "diffusers_pipeline": "gen.diffusers_call",
    }
    if name not in homes:
        raise AttributeError(f"module 'gen' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(homes[name]), name)
