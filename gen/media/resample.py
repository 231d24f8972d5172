"""Resample sounds: with torchaudio where it is installed, else with scipy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from types import ModuleType

import numpy as np
import torch

from gen.core.errors import GenError
from gen.media.bounds import require_bytes
from gen.media.containers import require_package
from gen.media.torchaudio_compat import ensure


def functional() -> ModuleType:
    """Import ``torchaudio.functional``. Raises ``GenError`` if it is missing."""
    ensure()
    return require_package("torchaudio.functional", '"gen-toolkit[torchaudio]"', "resampling")


def resampler() -> Callable[[np.ndarray, int, int], np.ndarray]:
    """Return the function behind ``resample``, of the same arguments and result. Raises
    ``GenError`` where both packages are missing."""
    try:
        package = functional()
    except GenError:
        signal = require_package("scipy.signal", '"gen-toolkit[audio]"', "resampling")
    else:
        return partial(_windowed_sinc, package)

    def polyphase(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
        common = gcd(rate, target)
        return signal.resample_poly(wave, target // common, rate // common)

    return polyphase


def _windowed_sinc(package: ModuleType, wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    common = gcd(rate, target)
    # the filter has a row of so many weights for each of so many phases
    weights = target // common * (rate // common)
    require_bytes("the filter that resamples", 8 * weights, f"{rate} to {target} per second")
    return package.resample(torch.from_numpy(wave.T.copy()), rate, target).numpy().T


def resample(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Resample a wave [n, channels] from ``rate`` to ``target`` samples per second by a
    windowed-sinc filter.

    Returns:
        Float32 [ceil(n target / rate), channels].

    Raises:
        GenError: torchaudio and scipy are missing, or the result is larger than memory.
    """
    count = len(wave) * target // max(rate, 1)
    about = f"{count:,} samples at {target} per second (from {rate})"
    require_bytes("the resampled sound", 4 * count * wave.shape[1], about)
    return np.asarray(resampler()(wave.astype(np.float32), rate, target), np.float32)
