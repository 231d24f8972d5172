"""EnCodec audio tokens (Defossez et al., "High Fidelity Neural Audio Compression", arXiv
2210.13438): a frontend over ``transformers.EncodecModel``.

The adapter handles the traps of the class: the number of codebooks follows from a bandwidth in
kbit/s, by default the smallest; codes [chunks, B, Q, T] have a chunk axis. Models that normalise
the loudness of chunks decode with scales that no code holds, so they are refused, as are all models
that split waves into chunks. The decoder holds an LSTM with unlimited memory, so EnCodec cannot be
streamed.
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
    """EnCodec codec: codes [B, Q, T] of waves [B, 1, n] in [-1, 1] at ``rate`` samples per second.

    n is a whole number of frames. ``num_quantizers``: Q, by default all codebooks of the model.
    """

    architecture = "EncodecModel"

    def __init__(self, model, num_quantizers: int | None = None):
        """Wrap a model. Raises ``GenError`` for a number of codebooks that it does not have, and
        for models that normalise, split into chunks or are stereo."""
        super().__init__(model)
        c = model.config
        if c.normalize:
            raise bad_value(
                "normalize of the EnCodec model",
                c.normalize,
                "false: no code holds the loudness of a normalised wave",
            )
        if c.chunk_length_s is not None:
            raise bad_value(
                "chunk_length_s of the EnCodec model",
                c.chunk_length_s,
                "none: overlapping chunks have no codes of their own",
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
        highest = self.model.config.target_bandwidths[-1]
        codes = self.model.encode(x, bandwidth=highest).audio_codes[0]
        return first_codebooks(codes, self.streams, highest)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[None], [None]).audio_values

    @property
    def codebooks(self) -> list[Tensor]:
        return [
            layer.codebook.embed.detach() for layer in self.model.quantizer.layers[: self.streams]
        ]
