"""Video VQ tokens: a frontend over ``transformers.Emu3VQVAE`` (Wang et al., "Emu3", arXiv
2409.18869), causal in time.

The adapter handles the traps of the class: ``encode`` crops the frames of a video to a given
height, and decoding returns a fixed number of frames per code frame, the first included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.codec import Codec


@register("tokenizer", "video_vq")
class VideoVQ(Codec):
    """Video tokenizer: codes [B, 1, T, H, W] of clips [B, F, 3, h, w] in [-1, 1].

    F, h and w are multiples of ``config.compression``.
    """

    chunk = 1
    architecture = "Emu3VQVAE"
    time_axis = 1

    def __init__(self, model):
        super().__init__(model)
        c = model.config
        factor = model.spatial_scale_factor
        self.config = FrontendConfig(
            "video", "codes", (c.codebook_size,), (c.temporal_downsample_factor, factor, factor)
        )
        # every temporal convolution of the decoder reaches two of its frames back
        self.context = 2 + 4 * c.num_res_blocks + 2

    def preprocess(self, media: Any) -> Tensor:
        """Convert frames uint8 [F, h, w, 3] to float [F, 3, h, w] in [-1, 1]. Raises ``GenError``
        for anything else, and for sizes that are no whole number of codes."""
        frames = np.asarray(media)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
            raise GenError(
                f"the clip is an array of {frames.dtype} {frames.shape}; expected uint8 [F, h,"
                " w, 3]"
            )
        if any(n % f for n, f in zip(frames.shape, self.config.compression, strict=False)):
            raise GenError(
                f"the clip is {frames.shape[:3]}; expected multiples of {self.config.compression}"
                " (frames, height, width)"
            )
        x = rearrange(torch.from_numpy(frames.copy()), "f h w c -> f c h w")
        return self._like_model(x) / 127.5 - 1

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        uncropped = [[10**9, 10**9]] * len(x)
        return torch.stack(self.model.encode(x, image_sizes=uncropped).image_tokens)[:, None]

    @torch.no_grad()
    def decode_at_once(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[:, 0])

    @torch.no_grad()
    def decode_chunk(self, codes: Tensor, first: int) -> Tensor:
        """Decode the chunk of codes [B, 1, T, H, W] that begins at ``first``.

        Its context passes through the temporal convolutions only, since the layers after them work
        frame by frame.
        """
        begin = max(0, first - self.context)
        vectors = self.model.quantize.embedding(codes[:, 0, begin : first + self.chunk])
        z = rearrange(vectors, "b t h w c -> b c t h w")

        def frames_first(x):
            return rearrange(x, "b c t h w -> b t c h w")

        context_frames = (first - begin) * self.config.compression[0]
        drop_context = self.model.decoder.time_conv[-1].register_forward_hook(
            lambda module, inputs, out: out[:, :, context_frames:]
        )
        try:
            x = self.model.decoder(frames_first(self.model.post_quant_conv(z)), frames_first(z))
        finally:
            drop_context.remove()
        return x.reshape(len(codes), -1, *x.shape[-3:])

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert frames [F, 3, h, w] in [-1, 1] to uint8 [F, h, w, 3]."""
        pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return rearrange(pixels, "f c h w -> f h w c").cpu().numpy()

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.model.quantize.embedding.weight.detach()]

    @property
    def fingerprint(self) -> Tensor:
        return self.codebooks[0]

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        frames, _, height, width = input_shape[-4:]
        return tuple(
            n // f for n, f in zip((frames, height, width), self.config.compression, strict=True)
        )
