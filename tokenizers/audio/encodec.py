"""EnCodec audio tokens (Defossez et al., "High Fidelity Neural Audio Compression", arXiv
2210.13438): a frontend over ``transformers.EncodecModel``.

Traps of the class that this adapter owns: it quantises with as many codebooks as a bandwidth in
kbit/s pays for, the smallest one unless told otherwise; its codes [chunks, B, Q, T] have an axis of
chunks; and models that normalise the loudness of chunks decode with scales that are no codes, so
they are refused, and with them all that cut waves into chunks. The decoder holds an LSTM, which
remembers for ever: whole waves are decoded, and nothing is streamed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import bad_value
from gen.core.registry import register
from gen.tokenizers.base.codec import Mono, first_codebooks, quantizers


@register("tokenizer", "encodec")
class Encodec(Mono):
    """Codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples a second; n is a whole
    number of frames. ``num_quantizers``: Q, by default all codebooks of the model."""

    architecture = "EncodecModel"

    def __init__(self, model, num_quantizers: int | None = None):
        """Raises ``GenError`` for a number of codebooks that the model does not have, and for
        models that normalise, cut into chunks or are stereo."""
        super().__init__(model)
        c = model.config
        if c.normalize:
            raise bad_value(
                "normalize of the EnCodec model",
                c.normalize,
                "false: how loud a normalised wave was is in none of its codes",
            )
        if c.chunk_length_s is not None:
            raise bad_value(
                "chunk_length_s of the EnCodec model",
                c.chunk_length_s,
                "none: chunks that overlap have no codes of their own",
            )
        if c.audio_channels != 1:
            raise bad_value("audio_channels of the EnCodec model", c.audio_channels, "1")
        self.streams = quantizers(num_quantizers, len(model.quantizer.layers))
        self.rate, self.frame = c.sampling_rate, c.hop_length
        self.config = FrontendConfig(
            "speech", "codes", (c.codebook_size,) * self.streams, (self.frame,)
        )

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        every = self.model.config.target_bandwidths[-1]
        return first_codebooks(
            self.model.encode(x, bandwidth=every).audio_codes[0], self.streams, every
        )

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[None], [None]).audio_values

    @property
    def codebooks(self) -> list[Tensor]:
        return [
            layer.codebook.embed.detach() for layer in self.model.quantizer.layers[: self.streams]
        ]
