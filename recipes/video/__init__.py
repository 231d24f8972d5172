"""Recipe of the video models."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
