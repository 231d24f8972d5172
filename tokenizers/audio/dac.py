"""DAC audio tokens (Kumar et al., "High-Fidelity Audio Compression with Improved RVQGAN", arXiv
2306.06546): a frontend over ``transformers.DacModel``.

The adapter handles the traps of the class: decoded waves have no channel axis, and with an odd
stride they are a few samples short, which silence fills; a code stands for the projected vector of
its codebook, not the raw one. The decoder is not causal, so DAC cannot be streamed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.registry import register
from gen.tokenizers.base.codec import Mono, quantizers


@register("tokenizer", "dac")
class DAC(Mono):
    """DAC codec: codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples per second.

    n is a whole number of frames. ``num_quantizers``: Q, by default all codebooks of the model.
    """

    architecture = "DacModel"

    def __init__(self, model, num_quantizers: int | None = None):
        """Wrap a model. Raises ``GenError`` for a number of codebooks that it does not have."""
        super().__init__(model)
        c = model.config
        self.streams = quantizers(num_quantizers, c.n_codebooks)
        self.rate, self.frame = c.sampling_rate, c.hop_length
        self.config = FrontendConfig(
            "speech", "codes", (c.codebook_size,) * self.streams, (self.frame,)
        )

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.model.encode(x, n_quantizers=self.streams).audio_codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        wave = self.model.decode(audio_codes=codes).audio_values[:, None]
        return pad(wave, (0, codes.shape[-1] * self.frame - wave.shape[-1]))

    @property
    @torch.no_grad()
    def codebooks(self) -> list[Tensor]:
        """Projected vectors [V, D] per codebook, including the projection's bias: the terms of the
        decoder's sum."""
        return [
            q.out_proj(q.codebook.weight.T[None])[0].T.detach()
            for q in self.model.quantizer.quantizers[: self.streams]
        ]
