"""Interfaces for users of transformers, diffusers and lerobot."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
