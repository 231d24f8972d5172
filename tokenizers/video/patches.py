"""Patches: the pixels of small frames as latents, without weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, TokenFrontend
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.nets.frames import FrameConfig, to_pixels, to_positions


@register("tokenizer", "patches")
class Patches(TokenFrontend):
    """Frames uint8 [B, F, H, W, 3] as latents [B, C, F, rows, columns] in [-1, 1].

    Args:
        config: sizes of frames and patches.
        device: device of latents.
        dtype: floating-point type of latents.
    """

    def __init__(
        self, config: FrameConfig, device: Any = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.sizes, self.device, self.dtype = config, device, dtype
        self.config = FrontendConfig(
            "world", "latents", (), (1, config.patch, config.patch), config.position_channels
        )

    @classmethod
    def from_pretrained(cls, folder: Any = None, device: Any = "cpu", dtype=torch.float32):
        """Make the frontend of the embedded frame model: there is nothing to load."""
        return cls(FrameConfig(), device, dtype)

    @property
    def codebooks(self) -> list[Tensor]:
        return []

    @property
    def fingerprint(self) -> Tensor:
        return torch.tensor([*self.sizes.frame, self.sizes.patch])

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape[-4], self.sizes.rows, self.sizes.columns

    def preprocess(self, media: Any) -> Tensor:
        """Convert frames to a tensor uint8 [F, H, W, 3]. Raises ``GenError`` for other shapes."""
        frames = np.asarray(media)
        if frames.dtype != np.uint8 or frames.shape[1:] != tuple(self.sizes.frame):
            raise GenError(
                f"the frames are {frames.dtype} of shape {frames.shape}; expected uint8 [F,"
                f" {', '.join(map(str, self.sizes.frame))}]"
            )
        return torch.from_numpy(frames.copy()).to(self.device)

    def encode(self, x: Tensor) -> Tensor:
        positions = to_positions(x, self.sizes).to(self.dtype)  # [B, F, P, C]
        cells = positions.unflatten(2, (self.sizes.rows, self.sizes.columns))
        return cells.movedim(-1, 1)

    def decode(self, codes: Tensor) -> Tensor:
        if codes.ndim != 5 or codes.shape[1] != self.config.channels:
            raise GenError(
                f"latents have shape {tuple(codes.shape)}; expected [B, {self.config.channels}, F,"
                f" {self.sizes.rows}, {self.sizes.columns}]"
            )
        return to_pixels(codes.movedim(1, -1).flatten(2, 3), self.sizes)

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert frames uint8 [F, H, W, 3] to an array."""
        return x.cpu().numpy()
