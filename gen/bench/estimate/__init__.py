"""Cost model: time of samplers on a device, from counted kernels and measured forward passes."""

from gen.media import torchaudio_compat

torchaudio_compat.ensure()  # before transformers is imported
