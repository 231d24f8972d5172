"""X-Codec audio tokens (Ye et al., "Codec Does Matter", arXiv 2408.17175): a frontend over
``transformers.XcodecModel``.

Its encoder joins the features of a codec's encoder and of a speech model, and quantises both
together. The adapter handles the traps of the class: the number of codebooks follows from a
bandwidth; a codec and a speech model with different frame rates cannot be joined, which is checked
at loading. The decoder is not causal, so X-Codec cannot be streamed.
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
    """X-Codec codec: codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples per second.

    n is a whole number of frames. ``num_quantizers``: Q, by default all codebooks of the model.
    """

    architecture = "XcodecModel"

    def __init__(self, model, num_quantizers: int | None = None):
        """Wrap a model. Raises ``GenError`` for a number of codebooks that it does not have, and if
        its codec and its speech model have different frame rates."""
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
        highest = self.model.config.target_bandwidths[-1]
        codes = self.model.encode(x, bandwidth=highest).audio_codes
        return first_codebooks(codes, self.streams, highest)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes).audio_values

    @property
    def codebooks(self) -> list[Tensor]:
        return [q.codebook.embed.detach() for q in self.model.quantizer.quantizers[: self.streams]]
