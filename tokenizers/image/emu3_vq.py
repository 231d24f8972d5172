"""Emu3's image tokenizer: a frontend over ``transformers.Emu3VQVAE`` (Wang et al.,
"Emu3", arXiv 2409.18869).

The network takes clips only. An image x is encoded as the clip (x, ..., x) with the frames of one
frame of codes, and the first decoded frame is the image;
``gen.tokenizers.video.video_vq`` is the same network for clips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.registry import register
from gen.tokenizers.base.rgb import RGB
from gen.tokenizers.video.video_vq import VideoVQ


@register("tokenizer", "emu3_vq")
class Emu3VQ(RGB):
    """VQ image tokenizer: codes [B, 1, H, W] of RGB images [B, 3, h, w] in [-1, 1].

    h and w are multiples of ``config.compression``.
    """

    architecture = VideoVQ.architecture

    def __init__(self, model):
        """``model``: a ``transformers.Emu3VQVAE``."""
        self.video = VideoVQ(model)
        self.model = self.video.model
        _, self.factor, _ = self.video.config.compression
        self.config = FrontendConfig(
            "image", "codes", self.video.config.codebook_sizes, (self.factor, self.factor)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a folder or Hub id in the transformers layout. Raises ``GenError`` if it cannot be
        read."""
        return cls(VideoVQ.from_pretrained(path, device, dtype).model)

    @property
    def codebooks(self) -> list[Tensor]:
        return self.video.codebooks

    @property
    def fingerprint(self) -> Tensor:
        return self.video.fingerprint

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        sizes = [list(x.shape[-2:])] * len(x)
        return torch.stack(self.model.encode(x, image_sizes=sizes).image_tokens)[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[:, 0].to(self.model.device))
