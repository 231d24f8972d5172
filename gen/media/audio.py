"""Read and write audio files: 16-bit WAV out, any sound file of libsndfile in.

``gen.media.containers`` states what both directions promise. soundfile is imported at first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gen.core.errors import GenError
from gen.media.containers import (
    AUDIO_CHUNKS,
    append_riff_comment,
    existing_file,
    info_to_comment,
    plural,
    soundfile_module,
    truncation,
)


def write_wav(path: Path, wave: Any, rate: int, info: dict[str, Any] | None = None) -> None:
    """Write a WAV file with 16 bits per sample.

    A wave read from such a file is written to the same samples.

    Args:
        path: Output file.
        wave: Float [n] or [n, channels]; values outside [-1, 1] are clipped.
        rate: Samples per second.
        info: JSON-serialisable metadata, stored as the comment.

    Raises:
        ValueError: Another shape, an empty wave, NaN or infinity.
    """
    sf = soundfile_module()
    wave = np.asarray(wave, dtype=np.float64)
    is_finite = np.isfinite(wave).all()
    if wave.ndim not in (1, 2) or not wave.size or not is_finite:
        raise ValueError(
            f"the wave has the shape {wave.shape}{'' if is_finite else ' and holds NaN or inf'};"
            " expected finite numbers [n] or [n, channels]"
        )
    samples = np.clip(np.rint(wave * 2**15), -(2**15), 2**15 - 1).astype(np.int16)
    channels = 1 if wave.ndim == 1 else wave.shape[1]
    # plain PCM has no chunk with a date
    with sf.SoundFile(path, "w", int(rate), channels, "PCM_16", format="WAV") as file:
        file.write(samples)
    if info:
        append_riff_comment(Path(path), info_to_comment(info))


def read_wav(path: str | Path, rate: int, channels: int = 1) -> np.ndarray:
    """Read a sound file of a known number of channels, at a rate.

    torchaudio resamples a file of another rate.

    Args:
        path: Input file.
        rate: Samples per second of the result.
        channels: Expected number of channels.

    Returns:
        Float32 [n], or [n, channels] for several channels.

    Raises:
        GenError: Another number of channels, another rate where torchaudio is missing, or a file
            that ``open_sound`` refuses.
    """
    wave, file_rate = open_sound(path)
    if file_rate != rate:
        wave = _resampled(wave, path, file_rate, rate)
    if wave.shape[1] != channels:
        raise GenError(
            f"sound {path} has {plural(wave.shape[1], 'channel')}; expected {channels}. Convert"
            f" it, for example with: ffmpeg -i in.wav -ac {channels} out.wav"
        )
    return wave[:, 0] if channels == 1 else wave


def _resampled(wave: np.ndarray, path: str | Path, file_rate: int, rate: int) -> np.ndarray:
    from gen.media.resample import resample  # imports torch

    try:
        return resample(wave, file_rate, rate)
    except GenError as error:
        raise GenError(
            f"sound {path} has {file_rate} samples per second; expected {rate}. Convert it, for"
            f" example with: ffmpeg -i in.wav -ar {rate} out.wav. {error}"
        ) from None


def open_sound(path: str | Path) -> tuple[np.ndarray, int]:
    """Read any sound file.

    Returns:
        Samples, float32 [n, channels] with n > 0, and the samples per second.

    Raises:
        GenError: A file that is missing, no sound, truncated, empty or not finite.
    """
    sf, path = soundfile_module(), existing_file(path, "sound")
    try:
        with sf.SoundFile(path) as file:
            rate, stated = file.samplerate, file.frames
            wave = file.read(dtype="float32", always_2d=True)
    except (sf.SoundFileError, OSError, TypeError) as error:  # TypeError: a name that ends in .raw
        raise GenError(
            f"sound {path} cannot be read: {' '.join(str(error).split())}; expected a sound file"
            " such as WAV"
        ) from None
    # soundfile returns the samples of a truncated file without an error
    if missing := truncation(path, AUDIO_CHUNKS):
        raise GenError(f"sound {path} is cut off: its header promises {missing}")
    if len(wave) < stated:
        raise GenError(
            f"sound {path} is cut off: its header promises {stated} samples, and {len(wave)} are"
            " there"
        )
    if not len(wave):
        raise GenError(f"sound {path} is empty; expected at least one sample")
    if not np.isfinite(wave).all():
        raise GenError(f"sound {path} holds NaN or inf; expected finite samples")
    return wave, rate
