"""Base class of video tokenizers that encode the first frame alone: frame 0 is one slice of the
grid, and every r frames after it are another.

    F = 1 + r k frames  <->  T = 1 + k slices,    r = ``config.compression[0]``

The first slice equals the codes of frame 0 as an image, since the encoder is causal in time. Other
numbers of frames are refused instead of padded: padding would be decoded to invented frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError
from gen.models.load.libraries import diffusers
from gen.models.load.pretrained import strictly


class Clips(TokenFrontend):
    """Video frontend over a diffusers class.

    Signals are clips [B, F, 3, h, w] in [-1, 1]. ``architecture``: name of the class.
    """

    architecture: ClassVar[str]

    def __init__(self, model):
        self.model = model.eval()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
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

    def whole(self, frames: int) -> int:
        """Return the largest valid clip length of at most ``frames``. Raises ``GenError`` below
        1."""
        if frames < 1:
            raise GenError(f"the clip has {frames} frames; expected at least 1")
        return frames - (frames - 1) % self.config.compression[0]

    def frames_for(self, slices: int) -> int:
        """Return the number of frames that ``slices`` slices of the grid are decoded to."""
        return 1 + (slices - 1) * self.config.compression[0]

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        frames, _, height, width = input_shape[-4:]
        r, h, w = self.config.compression
        return 1 + (frames - 1) // r, height // h, width // w

    def preprocess(self, media: Any) -> Tensor:
        """Convert frames uint8 [F, h, w, 3], or an image [h, w, 3], to float [F, 3, h, w] in [-1,
        1].

        Raises ``GenError`` for anything else, and for sizes that are no whole number of codes.
        """
        frames = np.asarray(media)
        frames = frames[None] if frames.ndim == 3 else frames
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
            raise GenError(
                f"the clip is an array of {frames.dtype} {frames.shape}; expected uint8 [F, h,"
                " w, 3]"
            )
        x = rearrange(torch.from_numpy(frames.copy()), "f h w c -> f c h w")
        self._require_whole(x)
        return x.to(self.model.device, self.model.dtype) / 127.5 - 1

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert frames [F, 3, h, w] in [-1, 1] to uint8 [F, h, w, 3]."""
        pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return rearrange(pixels, "f c h w -> f h w c").cpu().numpy()

    def _require_whole(self, x: Tensor) -> None:
        """Raise ``GenError`` unless ``x`` [..., F, 3, h, w] is a whole number of codes."""
        frames, _, height, width = x.shape[-4:]
        r, h, w = self.config.compression
        low = self.whole(frames)
        if low != frames:
            raise GenError(
                f"the clip has {frames} frames; expected 1 + {r} k of them, such as {low} or"
                f" {low + r}"
            )
        if height % h or width % w:
            raise GenError(
                f"the frames are {height}x{width}; expected multiples of {h}x{w} (height, width)"
            )
