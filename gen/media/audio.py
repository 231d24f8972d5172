"""Read and write audio files: 16-bit WAV, FLAC and MP3 out, any sound file of libsndfile in.

``gen.media.containers`` states what both directions promise. soundfile is imported at first use.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gen.core.errors import GenError
from gen.core.tables import plural
from gen.media.bounds import require_bytes
from gen.media.containers import (
    AUDIO_CHUNKS,
    VIDEO_CHUNKS,
    append_riff_comment,
    av_module,
    existing_file,
    info_to_comment,
    opened,
    soundfile_module,
    truncation,
    unreadable,
)

FORMATS = ("wav", "flac", "mp3")
CONTAINERS = (".m4a", ".aac", ".mka", ".mkv", ".mp4", ".webm")  # read by PyAV
MP3_RATE = 192_000  # bits per second


def write_sound(path: Path, wave: Any, rate: int, info: dict[str, Any] | None = None) -> None:
    """Write a sound in the format of its extension: WAV, FLAC (both lossless, 16 bits) or MP3.

    Args:
        path: Output file.
        wave: Float [n] or [n, channels]; values outside [-1, 1] are clipped.
        rate: Samples per second.
        info: JSON-serialisable metadata, stored as the comment.

    Raises:
        ValueError: Another shape, an empty wave, NaN or infinity.
        GenError: Another extension, or a rate that MP3 does not have.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix == "wav":
        write_wav(path, wave, rate, info)
    elif suffix in ("flac", "mp3"):
        _encode(path, suffix, _samples(wave), int(rate), info)
    else:
        raise GenError(f"sound {path.name} ends in .{suffix}; expected .{', .'.join(FORMATS)}")


def _encode(
    path: Path, suffix: str, samples: np.ndarray, rate: int, info: dict[str, Any] | None
) -> None:
    """Encode samples, int16 [n, channels], on one thread."""
    av = av_module(f"a file of {suffix.upper()} sound")
    codec, kind = ("flac", "s16") if suffix == "flac" else ("libmp3lame", "s16p")
    rates = av.Codec(codec, "w").audio_rates
    if rates and rate not in rates:
        raise GenError(
            f"the sound has {rate} samples per second, which {suffix.upper()} cannot hold; expected"
            f" {', '.join(map(str, sorted(rates)))}, or .wav or .flac"
        )
    layout = "mono" if samples.shape[1] == 1 else "stereo"
    if samples.shape[1] > 2:
        raise GenError(
            f"the sound has {samples.shape[1]} channels; expected 1 or 2 in {suffix.upper()}"
        )
    with av.open(str(path), "w", format=suffix) as container:
        container.flags |= av.container.Flags.bitexact.value  # no random ids, no library versions
        if info:
            container.metadata["comment"] = info_to_comment(info)
        stream = container.add_stream(codec, rate=rate, layout=layout)
        stream.format, stream.codec_context.thread_count = kind, 1
        stream.codec_context.flags |= av.codec.context.Flags.bitexact.value
        if suffix == "mp3":
            stream.bit_rate = MP3_RATE
        data = samples.reshape(1, -1) if kind == "s16" else samples.T
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(data), format=kind, layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        for part in _frames_of(av, frame, stream):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


def _frames_of(av: Any, frame: Any, stream: Any) -> list[Any]:
    """Cut a frame into those of the codec's size."""
    stream.codec_context.open()
    fifo = av.AudioFifo()
    fifo.write(frame)
    size = stream.codec_context.frame_size or 4096
    return [*fifo.read_many(size), *([rest] if (rest := fifo.read()) else [])]


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
    sf, samples = soundfile_module(), _samples(wave)
    # plain PCM has no chunk with a date
    with sf.SoundFile(path, "w", int(rate), samples.shape[1], "PCM_16", format="WAV") as file:
        file.write(samples)
    if info:
        append_riff_comment(Path(path), info_to_comment(info))


def _samples(wave: Any) -> np.ndarray:
    """Round a wave to int16 [n, channels]. Raises ``ValueError`` for one that is none."""
    wave = np.asarray(wave, dtype=np.float64)
    is_finite = np.isfinite(wave).all()
    if wave.ndim not in (1, 2) or not wave.size or not is_finite:
        raise ValueError(
            f"the wave has the shape {wave.shape}{'' if is_finite else ' and holds NaN or inf'};"
            " expected finite numbers [n] or [n, channels]"
        )
    samples = np.clip(np.rint(wave * 2**15), -(2**15), 2**15 - 1).astype(np.int16)
    return samples.reshape(len(samples), -1)


def read_wav(path: str | Path, rate: int, channels: int = 1, mix: bool = False) -> np.ndarray:
    """Read a sound file of a known number of channels, at a rate.

    A file of another rate is resampled (``gen.media.resample``).

    Args:
        path: Input file.
        rate: Samples per second of the result.
        channels: Expected number of channels.
        mix: Average the channels of a file that has more than one, where one is expected.

    Returns:
        Float32 [n], or [n, channels] for several channels.

    Raises:
        GenError: Another number of channels, another rate where no package resamples, or a
            file that ``open_sound`` refuses.
    """
    wave, file_rate = open_sound(path)
    if mix and channels == 1:
        wave = wave.mean(1, keepdims=True)
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
    if path.suffix.lower() in CONTAINERS:
        return _checked_sound(*_decoded(path), path)
    try:
        with path.open("rb") as raw, sf.SoundFile(source := _Unlisted(raw)) as file:
            source.is_hidden = False
            rate, stated = file.samplerate, file.frames
            told = f"{stated:,} samples of {plural(file.channels, 'channel')}"
            require_bytes(f"sound {path}", 4 * stated * file.channels, told)
            wave = file.read(dtype="float32", always_2d=True)
    except (GenError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything
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
    return _checked_sound(wave, rate, path)


class _Unlisted:
    """File as libsndfile reads it: a list of a RIFF file has another name in its header.

    libsndfile takes the sizes in lists for signed numbers, so that a file of some bytes sends it
    back again and again, for ever. What lists hold, such as titles and cue labels, is not needed.

    Attributes:
        is_hidden: whether lists have the other name, as long as the header is read.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.name, self.is_hidden = file, file.name, True
        self.tell = file.tell

    def seek(self, offset: int, whence: int = 0) -> None:
        """Move to an offset; stay where it lies before the file, which libsndfile asks for."""
        with suppress(OSError, ValueError):
            self.file.seek(offset, whence)

    def read(self, count: int) -> bytes:
        """Read bytes. A name that begins or ends outside of them is found too."""
        if not self.is_hidden:
            return self.file.read(count)
        at = self.file.tell()
        before = min(3, at)
        self.file.seek(at - before)
        near = self.file.read(before + count + 3).replace(b"LIST", b"JUNK")
        found = near[before : before + count]
        self.file.seek(at + len(found))
        return found


def sound_header(path: Path) -> tuple[float, int, int]:
    """Return the seconds (0 where they are not stated), samples per second and channels that the
    header of a sound states. Raises ``GenError`` for what is no sound."""
    if path.suffix.lower() not in CONTAINERS:
        sf = soundfile_module()
        try:
            with existing_file(path, "sound").open("rb") as raw:
                info = sf.info(_Unlisted(raw))
        except (sf.SoundFileError, OSError, TypeError) as error:
            raise GenError(f"sound {path} cannot be read: {' '.join(str(error).split())}") from None
        return info.frames / info.samplerate, info.samplerate, info.channels
    av = av_module("a sound in a container")
    try:
        with opened(existing_file(path, "sound")) as container:
            if not container.streams.audio:
                raise GenError(f"sound {path} has no sound; expected a sound file such as WAV")
            stream = container.streams.audio[0]
            return (container.duration or 0) / av.time_base, stream.rate, stream.channels
    except av.FFmpegError as error:
        raise unreadable(f"sound {path}", error, "a sound file such as WAV") from None


def _checked_sound(wave: np.ndarray, rate: int, path: Path) -> tuple[np.ndarray, int]:
    """Return a sound, [n, channels], as ``open_sound`` does. Raises ``GenError``."""
    if not len(wave):
        raise GenError(f"sound {path} is empty; expected at least one sample")
    if not np.isfinite(wave).all():
        raise GenError(f"sound {path} holds NaN or inf; expected finite samples")
    return wave, rate


def _decoded(path: Path) -> tuple[np.ndarray, int]:
    """Decode the first sound of a container by PyAV: float32 [n, channels], and its rate.

    Raises:
        GenError: a damaged file, or one without a sound.
    """
    av = av_module("a sound in a container")
    if missing := truncation(path, VIDEO_CHUNKS):
        raise GenError(f"sound {path} is cut off: its header promises {missing}")
    parts, rate = [], 0
    try:
        with opened(path) as container:
            if not container.streams.audio:
                raise GenError(f"sound {path} has no sound; expected a sound file such as WAV")
            stream = container.streams.audio[0]
            rate, resampler = stream.rate, av.AudioResampler(format="fltp")
            for frame in container.decode(stream):
                parts += [part.to_ndarray() for part in resampler.resample(frame)]
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    except av.FFmpegError as error:
        raise unreadable(f"sound {path}", error, "a sound file such as WAV") from None
    wave = np.concatenate(parts, 1).T if parts else np.zeros((0, 1))
    return wave.astype(np.float32), rate
