"""Speech of a synthetic dataset of spoken words."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
