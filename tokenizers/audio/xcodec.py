"""X-Codec audio tokens (Ye et al., "Codec Does Matter", arXiv 2408.17175): a frontend over
``transformers.XcodecModel``.

Its encoder looks at a wave twice, through a codec's encoder and through a speech model, and
quantises both together. Traps of the class that this adapter owns: it quantises with as many
codebooks as a bandwidth pays for; and where the two halves of an encoder disagree about how many
frames a wave has, they cannot be joined, which is found out when a model is loaded. The decoder
looks at both sides of a frame, so that nothing can be streamed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.codec import Mono, first_codebooks, quantizers


@register("tokenizer", "xcodec")
class XCodec(Mono):
    """Codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples a second; n is a whole
    number of frames. ``num_quantizers``: Q, by default all codebooks of the model."""

    architecture = "XcodecModel"

    def __init__(self, model, num_quantizers: int | None = None):
        """Raises ``GenError`` for a number of codebooks that the model does not have, and for a
        model whose halves have other frames."""
        super().__init__(model)
        c = model.config
        self.streams = quantizers(num_quantizers, len(model.quantizer.quantizers))
        self.rate, self.frame = c.sample_rate, c.hop_length
        self.config = FrontendConfig(
            "speech", "codes", (c.codebook_size,) * self.streams, (self.frame,)
        )
        semantic = c.semantic_model_config
        step = math.prod((*semantic.conv_stride, *c.strides))
        if step != self.frame:
            raise GenError(
                f"the speech model of the X-Codec model has a frame every {step} samples, its codec"
                f" one every {self.frame}; expected the same"
            )

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        every = self.model.config.target_bandwidths[-1]
        return first_codebooks(
            self.model.encode(x, bandwidth=every).audio_codes, self.streams, every
        )

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes).audio_values

    @property
    def codebooks(self) -> list[Tensor]:
        return [q.codebook.embed.detach() for q in self.model.quantizer.quantizers[: self.streams]]
