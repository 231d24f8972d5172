"""Base classes of frontends over codecs of transformers: loading, device and dtype of signals, and
mono waves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import StreamingFrontend, TokenFrontend
from gen.core.errors import GenError, bad_value
from gen.models.load.libraries import transformers
from gen.models.load.locate import locate
from gen.models.load.pretrained import strictly


class Pretrained(TokenFrontend):
    """Frontend over a transformers class. ``architecture``: name of the class."""

    architecture: ClassVar[str]

    def __init__(self, model):
        self.model = model.eval()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Self:
        """Load a folder or Hub id in the transformers layout.

        ``options`` go to the constructor, such as ``num_quantizers``. Raises ``GenError`` for a
        missing or unreadable folder, and for weights that do not fit the class.
        """
        model = strictly(
            getattr(transformers(), cls.architecture),
            locate(folder, "frontend"),
            "frontend",
            folder,
            dtype=dtype,
        )
        return cls(model.to(device), **options)

    def _like_model(self, x: Tensor) -> Tensor:
        return x.to(self.model.device, self.model.dtype)


class Codec(Pretrained, StreamingFrontend):
    """Codec with a causal decoder and a finite receptive field."""


class Mono(Pretrained):
    """Mono codec: waves [B, 1, n] in [-1, 1] <-> codes [B, Q, n / frame].

    ``rate``: samples per second. ``frame``: samples per code; n is a multiple of it.
    """

    rate: int
    frame: int

    def preprocess(self, media: Any) -> Tensor:
        """Convert a wave float [n] to float [1, n]. Raises ``GenError`` for other shapes, and if n
        is no whole number of frames."""
        wave = np.asarray(media, dtype=np.float32)
        if wave.ndim != 1 or not len(wave) or len(wave) % self.frame:
            raise GenError(
                f"the wave has shape {wave.shape}; expected [n] with n a multiple of {self.frame}"
                " samples"
            )
        return self._like_model(torch.from_numpy(wave)[None])

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert a wave [1, n] to float32 [n], clipped to [-1, 1]."""
        return x[0].float().clamp(-1, 1).cpu().numpy()

    @property
    def fingerprint(self) -> Tensor:
        return torch.cat(self.codebooks)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[-1] // self.frame,)


def quantizers(requested: int | None, available: int, least: int = 1) -> int:
    """Return the number of codebooks to use: ``requested``, by default all ``available`` ones.
    Raises ``GenError`` for a number that the codec does not have."""
    if requested is None:
        return available
    is_int = isinstance(requested, int) and not isinstance(requested, bool)
    if not is_int or not least <= requested <= available:
        raise bad_value(
            "num_quantizers",
            requested,
            f"an integer from {least} to {available}, the codebooks of the codec",
        )
    return requested


def first_codebooks(codes: Tensor, streams: int, bandwidth: float) -> Tensor:
    """Return the codes [B, streams, T] of the first codebooks out of codes [B, Q, T].

    Residual quantisation is greedy, so the first codes do not depend on later codebooks. Raises
    ``GenError`` if there are fewer than ``streams``.
    """
    if codes.shape[1] < streams:
        raise GenError(
            f"the codec quantises with {codes.shape[1]} codebooks at its bandwidth of {bandwidth}"
            f" kbit/s; expected {streams}"
        )
    return codes[:, :streams]


def lasting(frontend: Mono, seconds: float | None, frames: int | None, default: float) -> int:
    """Return a length in frames, from ``seconds`` (rounded) or ``frames``; without either, from
    ``default`` seconds. Raises ``GenError`` for both, and for values below one frame."""
    if seconds is not None and frames is not None:
        raise GenError(f"seconds is {seconds!r} and frames is {frames!r}; expected one of them")
    if frames is not None:
        if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
            raise bad_value("frames", frames, "an integer of at least 1")
        return frames
    seconds = default if seconds is None else seconds
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < float("inf")
    ):
        raise bad_value("seconds", seconds, "a number above 0")
    return max(1, round(seconds * frontend.rate / frontend.frame))
