"""Mimi audio tokens (Defossez et al., "Moshi", arXiv 2410.00037): a frontend over
``transformers.MimiModel``.

The adapter handles the traps of the class: codebook 0 is quantised beside the others, not before
them; a wave that is no whole number of frames comes back longer; the decoder keeps no convolution
state between calls, so chunks are decoded together with their context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.registry import register
from gen.tokenizers.base.codec import Codec, Mono, quantizers


@register("tokenizer", "mimi")
class Mimi(Mono, Codec):
    """Mimi codec: codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples per second.

    n is a whole number of frames. ``num_quantizers``: Q, by default all codebooks of the model.
    """

    chunk = 6
    architecture = "MimiModel"
    time_axis = -1

    def __init__(self, model, num_quantizers: int | None = None):
        """Wrap a model. Raises ``GenError`` for a number of codebooks that it does not have."""
        super().__init__(model)
        c = model.config
        self.streams = quantizers(num_quantizers, c.num_quantizers, c.num_semantic_quantizers)
        self.rate, self.frame = c.sampling_rate, c.frame_size
        self.config = FrontendConfig(
            "speech", "codes", (c.codebook_size,) * self.streams, (self.frame,)
        )
        # attention windows of all layers, then the convolutions, counted at the rate before the
        # last up-sampling
        convolutions = (
            c.kernel_size
            + 2
            + sum(2 + 2 * c.dilation_growth_rate**j for j in range(c.num_residual_layers))
        )
        steps = int(c.encodec_frame_rate / c.frame_rate)  # of the transformer, per frame
        attention = c.num_hidden_layers * (c.sliding_window - 1)
        self.context = math.ceil((attention + convolutions) / steps) + 1

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.model.encode(x, num_quantizers=self.streams).audio_codes

    @torch.no_grad()
    def decode_at_once(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes).audio_values

    @property
    def codebooks(self) -> list[Tensor]:
        quantizer = self.model.quantizer
        parts = (
            quantizer.semantic_residual_vector_quantizer,
            quantizer.acoustic_residual_vector_quantizer,
        )
        return [layer.codebook.embed.detach() for part in parts for layer in part.layers][
            : self.streams
        ]
