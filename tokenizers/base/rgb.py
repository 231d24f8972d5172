"""Base class of image tokenizers: RGB pixels in and out, and the grid of an image."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError
from gen.media.images import as_rgb
from gen.models.load.libraries import diffusers
from gen.models.load.pretrained import strictly


class RGB(TokenFrontend):
    """Image frontend over a diffusers class.

    ``architecture``: name of the class. ``model`` takes images [B, 3, h, w] in [-1, 1] and has one
    vector per ``factor`` x ``factor`` pixels.
    """

    architecture: ClassVar[str]

    def __init__(self, model):
        self.model = model.eval()
        self.factor = 2 ** (len(model.config.block_out_channels) - 1)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str | torch.device = "cpu", dtype=torch.float32
    ) -> Self:
        """Load a folder or Hub id in the diffusers layout. Raises ``GenError`` if it cannot be
        read, or if its weights do not fit the class."""
        model = strictly(
            getattr(diffusers(), cls.architecture),
            path,
            "tokenizer",
            torch_dtype=dtype,
            low_cpu_mem_usage=False,
        )
        return cls(model.to(device))

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n // f for n, f in zip(input_shape[-2:], self.config.compression, strict=True))

    def preprocess(self, media: Image.Image | np.ndarray) -> Tensor:
        """Convert an RGB image to float [3, h, w] in [-1, 1]. Raises ``GenError`` for other shapes,
        and for sides that are no whole number of codes."""
        array = np.asarray(as_rgb(media) if isinstance(media, Image.Image) else media)
        if (
            array.ndim != 3
            or array.shape[-1] != 3
            or any(n % f for n, f in zip(array.shape, self.config.compression, strict=False))
        ):
            raise GenError(
                f"the image has shape {array.shape}; expected RGB with sides divisible by"
                f" {self.config.compression[0]}"
            )
        x = rearrange(torch.from_numpy(array.copy()), "h w c -> c h w")
        return x.to(self.model.device, self.model.dtype) / 127.5 - 1

    def postprocess(self, x: Tensor) -> Image.Image:
        """Convert an image [3, h, w] in [-1, 1] to a Pillow image."""
        pixels = ((x.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return Image.fromarray(rearrange(pixels, "c h w -> h w c").numpy())
