"""What frontends over codecs of transformers share: loading, where and in what precision signals go
in, and waves of one channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import StreamingFrontend, TokenFrontend
from gen.core.errors import GenError, bad_value
from gen.models.load.locate import locate
from gen.models.load.pretrained import strictly


class Pretrained(TokenFrontend):
    """A frontend over the class of transformers whose name is ``architecture``."""

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
        """``options``: of the class, such as ``num_quantizers``. Raises ``GenError`` for a missing
        or unreadable folder, and for weights that are not those of the class."""
        import transformers

        model = strictly(
            getattr(transformers, cls.architecture),
            locate(folder, "frontend"),
            "frontend",
            folder,
            dtype=dtype,
        )
        return cls(model.to(device), **options)

    def _like_model(self, x: Tensor) -> Tensor:
        return x.to(self.model.device, self.model.dtype)


class Codec(Pretrained, StreamingFrontend):
    """One whose decoder looks back only, and not for ever."""


class Mono(Pretrained):
    """Waves [B, 1, n] in [-1, 1] at ``rate`` samples a second, n a whole number of frames of
    ``frame`` samples <-> codes [B, Q, n / frame]."""

    rate: int
    frame: int

    def preprocess(self, media: Any) -> Tensor:
        """A wave float [n] -> float [1, n]. Raises ``GenError`` for anything else, or if n is no
        whole number of frames."""
        wave = np.asarray(media, dtype=np.float32)
        if wave.ndim != 1 or not len(wave) or len(wave) % self.frame:
            raise GenError(
                f"the wave has shape {wave.shape}; expected [n] with n a multiple of {self.frame}"
                " samples"
            )
        return self._like_model(torch.from_numpy(wave)[None])

    def postprocess(self, x: Tensor) -> np.ndarray:
        """A wave [1, n] -> float32 [n]."""
        return x[0].float().clamp(-1, 1).cpu().numpy()

    @property
    def fingerprint(self) -> Tensor:
        return torch.cat(self.codebooks)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[-1] // self.frame,)


def quantizers(asked: int | None, there: int, least: int = 1) -> int:
    """How many codebooks are used: all, or as many as asked for. Raises ``GenError`` for a number
    that a codec does not have."""
    if asked is None:
        return there
    if not isinstance(asked, int) or isinstance(asked, bool) or not least <= asked <= there:
        raise bad_value(
            "num_quantizers",
            asked,
            f"an integer from {least} to {there}, the codebooks of the codec",
        )
    return asked


def first_codebooks(codes: Tensor, streams: int, bandwidth: float) -> Tensor:
    """The codes [B, Q, T] of the first codebooks. Residual codes are greedy: the first of many
    codebooks say what they would say alone. Raises ``GenError`` where there are fewer."""
    if codes.shape[1] < streams:
        raise GenError(
            f"the codec quantises with {codes.shape[1]} codebooks at its bandwidth of {bandwidth}"
            f" kbit/s; expected {streams}"
        )
    return codes[:, :streams]


def lasting(frontend: Mono, seconds: float | None, frames: int | None, default: float) -> int:
    """How many frames are so many seconds, to the nearest one, or that many frames; ``default``
    seconds where nothing is said. Raises ``GenError`` for both, and for none."""
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
