"""Recipe of the models of sounds and captions."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
