"""Recipe of the frame model."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
