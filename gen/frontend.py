"""The frontend contract: media <-> codes or latents. Codes are always int64 [B, Q, *grid]; images have Q = 1. Latents are
floats [B, C, *grid], scaled to about unit variance inside the frontend.

Three jobs that real codecs mix are kept apart: the frontend (signal <-> code grid), the token space (which ids may stand
where, in which order) and the modality (what a prompt means, how media are saved and checked).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FrontendConfig:
    """What a frontend is. ``compression``: signal samples per code, one per grid axis. ``channels``: floats of a latent."""

    modality: str
    kind: str  # "codes" | "latents" | "ids"
    codebook_sizes: tuple[int, ...]
    compression: tuple[int, ...]
    channels: int = 0


class TokenFrontend(ABC):
    """See the module."""

    config: FrontendConfig

    @abstractmethod
    def preprocess(self, media: Any) -> Tensor:
        """One medium -> model range, without a batch axis."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Signals [B, ...] -> codes int64 [B, Q, *grid], or latents [B, C, *grid]."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, Q, *grid], or latents [B, C, *grid] -> signals [B, ...]."""

    @abstractmethod
    def postprocess(self, x: Tensor) -> Any:
        """One signal without a batch axis -> medium."""

    @property
    @abstractmethod
    def codebooks(self) -> list[Tensor]:
        """One table [V, D] per code stream: exactly the vectors that ``decode`` looks up. Latents have none."""

    @property
    @abstractmethod
    def fingerprint(self) -> Tensor:
        """Weights that tell this frontend from one that was trained otherwise."""

    @abstractmethod
    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The code grid of a signal of this shape."""
