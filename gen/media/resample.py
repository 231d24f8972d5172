"""Resample sounds with torchaudio."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from gen.media.containers import require_package
from gen.media.torchaudio_compat import ensure


def functional() -> ModuleType:
    """Import ``torchaudio.functional``. Raises ``GenError`` if it is missing."""
    ensure()
    return require_package("torchaudio.functional", '"gen-toolkit[audio]"', "resampling")


def resample(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Resample a wave [n, channels] from ``rate`` to ``target`` samples per second by
    windowed-sinc interpolation.

    Returns:
        Float32 [ceil(n target / rate), channels].

    Raises:
        GenError: torchaudio is missing.
    """
    signal = torch.from_numpy(np.ascontiguousarray(wave.T, dtype=np.float32))
    return functional().resample(signal, rate, target).numpy().T
