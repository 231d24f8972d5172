"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from gen.media import torchaudio_compat

# a torchaudio that cannot load must not take transformers and diffusers down with it
torchaudio_compat.ensure()


def load(modality, model=None, *, device="cpu", dtype="float32", **options):
    """A pipeline for a modality; see ``gen.pipeline.pipeline``, which this imports (and torch with
    it) on the first call."""
    from gen.pipeline.pipeline import load as _load

    return _load(modality, model, device=device, dtype=dtype, **options)


def __getattr__(name):
    """What imports transformers or diffusers comes when it is asked for."""
    homes = {
        "transformers_generate": "gen.interop.transformers",
        "diffusers_pipeline": "gen.interop.diffusers",
    }
    if name not in homes:
        raise AttributeError(f"module 'gen' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(homes[name]), name)
