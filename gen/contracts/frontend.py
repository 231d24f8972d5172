"""The frontend contract: media <-> codes or latents. Codes are always int64 [B, Q, *grid]; images
have Q = 1. Latents are floats [B, C, *grid], scaled to about unit variance inside the frontend.

Three jobs that real codecs mix are kept apart: the frontend (signal <-> code grid), the token space
(which ids may stand where, in which order) and the modality (what a prompt means, how media are
saved and checked).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError


@dataclass(frozen=True)
class FrontendConfig:
    """What a frontend is. ``compression``: signal samples per code, one per grid axis.
    ``channels``: floats of a latent."""

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
        """One table [V, D] per code stream: exactly the vectors that ``decode`` looks up. Latents
        have none."""

    @property
    @abstractmethod
    def fingerprint(self) -> Tensor:
        """Weights that tell this frontend from one that was trained otherwise."""

    @abstractmethod
    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The code grid of a signal of this shape."""


def codebook_digest(table: Tensor) -> str:
    """A name for a codebook [V, D] or other weights, the same in every floating-point type that
    holds half precision."""
    return hashlib.sha256(
        table.detach().cpu().to(torch.float16).contiguous().numpy().tobytes()
    ).hexdigest()[:16]


def require_same_frontend(
    config: Any, frontend: TokenFrontend, model_name: str, frontend_name: str
) -> None:
    """Another codebook or another autoencoder than a model's own would make noise, and nothing else
    would tell. Raises ``GenError``."""
    digest = codebook_digest(frontend.fingerprint)
    if getattr(config, "codebook_digest", digest) != digest:
        raise GenError(
            f"model {model_name} was trained on codebook {config.codebook_digest}, the frontend has"
            f" {digest}; put the frontend it was trained with beside it as {frontend_name!r}"
        )


def require_codes(codes: Tensor, config: FrontendConfig) -> None:
    """Raises ``GenError`` for codes of another shape or range than a frontend's own."""
    sizes, axes = config.codebook_sizes, len(config.compression)
    if codes.ndim != 2 + axes or codes.shape[1] != len(sizes) or not codes.numel():
        raise GenError(
            f"codes have shape {tuple(codes.shape)}; expected [B, {len(sizes)}] and the {axes} axes"
            " of the grid"
        )
    top = torch.tensor(sizes, device=codes.device).view(1, -1, *[1] * axes)
    if bool(((codes < 0) | (codes >= top)).any()):
        raise GenError(
            f"codes are in the range {int(codes.min())}..{int(codes.max())}; expected 0 to below"
            f" {', '.join(map(str, sizes))}"
        )


class StreamingFrontend(TokenFrontend):
    """One whose decoder looks back only, and not for ever: media come out while their codes are
    still being made.

    ``chunk``: frames of the grid that are decoded together. ``context``: frames before a chunk that
    its samples depend on. ``time_axis``: the axis of a signal that goes with the first axis of the
    grid. A whole signal is decoded chunk by chunk too, so that what is streamed is the same bit for
    bit; carrying the states of layers over would be faster and would round otherwise.
    """

    chunk: int
    context: int
    time_axis: int

    @abstractmethod
    def decode_at_once(self, codes: Tensor) -> Tensor:
        """As ``decode``, in one call of the model."""

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        parts = [self.decode_chunk(codes, first) for first in range(0, codes.shape[2], self.chunk)]
        return torch.cat(parts, self.time_axis)

    def decode_chunk(self, codes: Tensor, first: int) -> Tensor:
        """The samples of the frames ``first`` to ``first + chunk`` of codes [B, Q, *grid]; later
        frames are not looked at."""
        begin = max(0, first - self.context)
        x = self.decode_at_once(codes[:, :, begin : first + self.chunk])
        known = (first - begin) * self.config.compression[0]
        return x.narrow(self.time_axis, known, x.shape[self.time_axis] - known)
