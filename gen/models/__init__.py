"""Models behind the samplers' protocols: adapters of transformers and diffusers classes, KV caches
and the zoo."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers or diffusers are imported
