"""The frontend contract: an image tokenizer or codec, media <-> codes or latents.

Codes are int64 [B, Q, *grid] with Q codebooks; images have Q = 1. Latents are floats [B, C, *grid],
scaled to about unit variance inside the frontend.

Three jobs that published codecs mix are kept apart: the frontend (signal <-> code grid), the token
space (allowed tokens and their order) and the modality (meaning of prompts, files, checks).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.models.load.networks import config_field


@dataclass(frozen=True)
class FrontendConfig:
    """Description of a frontend.

    Attributes:
        modality: name of the modality whose media it codes.
        kind: ``codes``, ``latents`` or ``ids``.
        codebook_sizes: vectors of each codebook.
        compression: signal samples per code, one number per axis of the grid.
        channels: floats of a latent.
    """

    modality: str
    kind: str  # "codes" | "latents" | "ids"
    codebook_sizes: tuple[int, ...]
    compression: tuple[int, ...]
    channels: int = 0


class TokenFrontend(ABC):
    """Encoder and decoder of one modality, see the module.

    Attributes:
        grid: axes of the code grid where all media have the same; empty elsewhere.
        rate: samples per second of sound; 0 elsewhere.
    """

    config: FrontendConfig
    grid: tuple[int, ...] = ()
    rate: int = 0

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **options: Any) -> Any:
        """Load the frontend of a folder; subclasses say what else they take.

        Raises:
            GenError: frontends of this kind are part of another model's folder.
        """
        raise GenError(
            f"frontend {folder} cannot replace a {cls.__name__}, which is no folder of its own"
        )

    @abstractmethod
    def preprocess(self, media: Any) -> Tensor:
        """Return one image, waveform, ... in the range of the model, without a batch axis."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Return codes int64 [B, Q, *grid], or latents [B, C, *grid], of signals [B, ...]."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return signals [B, ...] of codes int64 [B, Q, *grid], or of latents [B, C, *grid]."""

    @abstractmethod
    def postprocess(self, x: Tensor) -> Any:
        """Return the image, waveform, ... of one signal without a batch axis."""

    @property
    @abstractmethod
    def codebooks(self) -> list[Tensor]:
        """Tables [V, D] that ``decode`` looks up, one per codebook; latents have none."""

    @property
    @abstractmethod
    def fingerprint(self) -> Tensor:
        """Weights that tell this frontend from one that was trained in another run."""

    @abstractmethod
    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the code grid of a signal of this shape."""

    def vocabulary(self) -> Vocabulary | None:
        """Return the bytes of every token; None where tokens are no text.

        Raises:
            GenError: a decoded text is not the bytes of its tokens one after the other.
        """
        return None

    def whole(self, frames: int) -> int:
        """Return the largest number of at most ``frames`` that makes whole slices of the grid.

        Raises:
            GenError: there is none.
        """
        step = self.config.compression[0]
        return frames // step * step


def codebook_digest(table: Tensor) -> str:
    """Return a digest of a codebook [V, D] or other weights.

    It is the same in every floating-point type that holds half precision.
    """
    return hashlib.sha256(
        table.detach().cpu().to(torch.float16).contiguous().numpy().tobytes()
    ).hexdigest()[:16]


def require_same_frontend(
    config: Any, frontend: TokenFrontend, model_name: str, frontend_name: str
) -> None:
    """Refuse a frontend that a model was not trained with: its tokens would decode to noise.

    Args:
        config: config of the model, a foreign class; an absent ``codebook_digest`` checks nothing.
        frontend: frontend that is loaded.
        model_name: name of the model, for the message.
        frontend_name: name that the model's own frontend should have, for the message.

    Raises:
        GenError: the digests differ.
    """
    digest = codebook_digest(frontend.fingerprint)
    if config_field(config, "codebook_digest", digest) != digest:
        raise GenError(
            f"model {model_name} was trained on codebook {config.codebook_digest}, the frontend has"
            f" {digest}; put the frontend it was trained with beside it as {frontend_name!r}"
        )


def require_codes(codes: Tensor, config: FrontendConfig) -> None:
    """Refuse codes of another shape or range than a frontend has. Raises ``GenError``."""
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
    """Frontend whose decoder looks back only, over a bounded context: it can stream.

    A whole signal is decoded chunk by chunk too, so that streamed media are the same bit for bit.
    Carrying the states of layers over would be faster, and would round differently.

    Attributes:
        chunk: frames of the grid that are decoded together.
        context: frames before a chunk that its samples depend on.
        time_axis: axis of a signal that goes with the first axis of the grid.
    """

    chunk: int
    context: int
    time_axis: int

    @abstractmethod
    def decode_at_once(self, codes: Tensor) -> Tensor:
        """Return what ``decode`` returns, in one call of the model."""

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        parts = [self.decode_chunk(codes, first) for first in range(0, codes.shape[2], self.chunk)]
        return torch.cat(parts, self.time_axis)

    def decode_chunk(self, codes: Tensor, first: int) -> Tensor:
        """Return the samples of frames ``first`` to ``first + chunk`` of codes [B, Q, *grid].

        Later frames are not looked at.
        """
        begin = max(0, first - self.context)
        x = self.decode_at_once(codes[:, :, begin : first + self.chunk])
        known = (first - begin) * self.config.compression[0]
        return x.narrow(self.time_axis, known, x.shape[self.time_axis] - known)
