"""Sounds of a condition as a model hears them: one channel at one sampling rate."""

from __future__ import annotations

import numpy as np

from gen.core.errors import GenError
from gen.core.tables import plural
from gen.media.given import GivenMedia
from gen.media.resample import resample


def mono_wave(sound: GivenMedia, rate: int, name: str = "audio") -> np.ndarray:
    """Return the samples of a sound, float32 [n].

    Args:
        sound: sound of one channel; one of unknown rate is taken to have the model's.
        rate: samples per second that the model takes; others are resampled.
        name: name of the part, for messages.

    Raises:
        GenError: several channels, or another rate where no package resamples.
    """
    channels = sound.array.shape[1]
    if channels != 1:
        raise GenError(f"{name} has {plural(channels, 'channel')}; the model takes 1")
    if sound.rate in (None, rate):
        return sound.array[:, 0]
    try:
        return resample(sound.array, sound.rate, rate)[:, 0]
    except GenError as error:
        raise GenError(
            f"{name} has {sound.rate} samples per second; the model takes {rate}. {error}"
        ) from None
