"""Tiles: clips of a drawn world as the ids of exact tiles of pixels.

The codebook holds every tile that the world can draw, so real clips come back bit for bit. Pixels
that a lossy file has changed are read as the nearest tile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, TokenFrontend, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.locate import locate, read_config, readable

WEIGHTS = "model.safetensors"


@register("tokenizer", "tiles")
class Tiles(TokenFrontend):
    """Video tokenizer: codes [B, 1, F, h / s, w / s] of clips [B, F, 3, h, w] in [-1, 1].

    Args:
        tiles: codebook uint8 [V, s, s, 3].
        device: device of signals and codes.
        dtype: floating-point type of signals.
    """

    name = "tiles"

    def __init__(self, tiles: Tensor, device: Any = "cpu", dtype: torch.dtype = torch.float32):
        square = tiles.ndim == 4 and tiles.shape[1] == tiles.shape[2] and tiles.shape[3] == 3
        if tiles.dtype != torch.uint8 or not square or not len(tiles):
            raise GenError(
                f"the tiles are {tiles.dtype} {tuple(tiles.shape)}; expected uint8 [V, s, s, 3]"
            )
        self.tiles, self.device, self.dtype = tiles.to(device), device, dtype
        self.side = tiles.shape[1]
        self.table = self.tiles.flatten(1).to(dtype) / 127.5 - 1
        self.config = FrontendConfig("video", "codes", (len(tiles),), (1, self.side, self.side))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load a zoo name or local folder. Raises ``GenError`` for a folder that is missing or
        holds another frontend."""
        path = Path(locate(folder, "frontend"))
        config = read_config(path)
        if config != {"frontend_class": cls.name}:
            raise GenError(
                f"the config of frontend {folder} is {config}; expected frontend_class {cls.name!r}"
            )
        with readable("frontend", folder):
            return cls(load_file(path / WEIGHTS)["tiles"], device, dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and the codebook."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({"tiles": self.tiles.cpu()}, path / WEIGHTS)
        (path / "config.json").write_text(json.dumps({"frontend_class": self.name}) + "\n")

    def preprocess(self, media: Any) -> Tensor:
        """Convert frames uint8 [F, h, w, 3] to float [F, 3, h, w] in [-1, 1].

        Raises ``GenError`` for anything else, and for sizes that are no whole number of tiles.
        """
        frames = np.asarray(media)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
            raise GenError(
                f"the clip is an array of {frames.dtype} {frames.shape}; expected uint8 [F, h,"
                " w, 3]"
            )
        if frames.shape[1] % self.side or frames.shape[2] % self.side:
            raise GenError(
                f"the frames are {frames.shape[1]}x{frames.shape[2]}; expected multiples of"
                f" {self.side}x{self.side} (height, width)"
            )
        x = rearrange(torch.from_numpy(frames.copy()), "f h w c -> f c h w")
        return x.to(self.device, self.dtype) / 127.5 - 1

    def encode(self, x: Tensor) -> Tensor:
        s = self.side
        parts = rearrange(x, "b f c (h y) (w x) -> b f h w (y x c)", y=s, x=s)
        distance = torch.cdist(parts.flatten(0, -2).to(self.table.dtype), self.table)
        return distance.argmin(1).view(parts.shape[:-1])[:, None]

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        s = self.side
        return rearrange(self.table[codes[:, 0]], "b f h w (y x c) -> b f c (h y) (w x)", y=s, x=s)

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert frames [F, 3, h, w] in [-1, 1] to uint8 [F, h, w, 3]."""
        pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return rearrange(pixels, "f c h w -> f h w c").cpu().numpy()

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.table]

    @property
    def fingerprint(self) -> Tensor:
        return self.tiles.flatten(1).float()

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        frames, _, height, width = input_shape[-4:]
        return frames, height // self.side, width // self.side
