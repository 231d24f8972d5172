"""Sound and video files: what modalities save, and what users hand in.

What is written depends on its content alone: no date, no library's random numbers, one encoder
thread. So the same seed makes the same file, and its hash can stand in a manifest. What is read is
whole or refused: a file that was cut off anywhere, or that is not what the caller needs, is a
``GenError`` of one line that says what came and what was expected. The libraries, soundfile and
PyAV, are imported when they are first needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gen.core.errors import GenError

CRF = "14"  # of H.264: no difference to be seen, and a small one to be measured
COUNT = "NUMBER_OF_FRAMES"  # the tag by which a Matroska file says how many frames it has
BT709 = 1  # the number of these primaries, this curve and this matrix in every video standard
SOUND = (b"data", b"SSND")  # the parts that hold the medium: of WAV and AIFF,
MOVING = (b"mdat", b"moov", b"moof", b"LIST", b"\x18\x53\x80\x67")  # of MP4, AVI and Matroska
IMAGES = (
    "image2",
    "tty",
)  # formats that FFmpeg takes for videos, beside those that end in "_pipe"


def _need(module: str, package: str, what: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: the library behind soundfile is missing
        raise GenError(
            f"{what} needs the package {package} ({error}); install it with: pip install {package}"
        ) from None


def _soundfile() -> ModuleType:
    return _need("soundfile", "soundfile", "a sound file")


def _av() -> ModuleType:
    return _need("av", "av", "a video file")


# --- Sound


def write_wav(path: Path, wave: Any, rate: int, info: dict[str, Any] | None = None) -> None:
    """``wave``: float [n] or [n, c]; what exceeds [-1, 1] is clipped. 16 bits per sample; ``info``
    becomes the comment.

    A wave that was read from such a file is written to the same samples. Raises ``ValueError`` for
    another shape, an empty wave and for NaN.
    """
    sf = _soundfile()
    wave = np.asarray(wave, dtype=np.float64)
    if wave.ndim not in (1, 2) or not wave.size or not np.isfinite(wave).all():
        raise ValueError(
            "the wave has the shape"
            f" {wave.shape}{'' if np.isfinite(wave).all() else ' and holds NaN or inf'}; expected"
            " finite numbers [n] or [n, channels]"
        )
    samples = np.clip(np.rint(wave * 2**15), -(2**15), 2**15 - 1).astype(np.int16)
    channels = 1 if wave.ndim == 1 else wave.shape[1]
    with sf.SoundFile(
        path, "w", int(rate), channels, "PCM_16", format="WAV"
    ) as file:  # PCM has no chunk with a date
        file.write(samples)
    if info:
        _add_comment(Path(path), _note(info))


def read_wav(path: str | Path, rate: int, channels: int = 1) -> np.ndarray:
    """Float32 [n], or [n, channels] of several. Raises ``GenError`` for anything but such a sound,
    whole and finite."""
    wave, found = open_sound(path)
    if found != rate:
        raise GenError(
            f"sound {path} has {found} samples per second; expected {rate}. Convert it, for example"
            f" with: ffmpeg -i in.wav -ar {rate} out.wav, or torchaudio.functional.resample"
        )
    if wave.shape[1] != channels:
        raise GenError(
            f"sound {path} has {_many(wave.shape[1], 'channel')}; expected {channels}. Convert it,"
            f" for example with: ffmpeg -i in.wav -ac {channels} out.wav"
        )
    return wave[:, 0] if channels == 1 else wave


def open_sound(path: str | Path) -> tuple[np.ndarray, int]:
    """Float32 [n, channels] and the samples per second of any sound file, n > 0. Raises
    ``GenError``."""
    sf, path = _soundfile(), _file(path, "sound")
    try:
        with sf.SoundFile(path) as file:
            rate, stated, wave = (
                file.samplerate,
                file.frames,
                file.read(dtype="float32", always_2d=True),
            )
    except (sf.SoundFileError, OSError, TypeError) as error:  # TypeError: a name that ends in .raw
        raise GenError(
            f"sound {path} cannot be read: {' '.join(str(error).split())}; expected a sound file"
            " such as WAV"
        ) from None
    if cut := _cut(path, SOUND):  # the library reads what is there and says nothing
        raise GenError(f"sound {path} is cut off: its header promises {cut}")
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


# --- Video


def write_mp4(
    path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None, scale: int = 1
) -> None:
    """H.264 that browsers play. ``frames``: uint8 [T, h, w, 3]; every pixel becomes a square of
    ``scale`` pixels.

    Raises ``ValueError`` for other frames and for sides that are odd after scaling, which H.264
    cannot store here.
    """
    frames = _frames(frames)
    h, w = (n * scale for n in frames.shape[1:3])
    if scale < 1 or h % 2 or w % 2:
        raise ValueError(
            f"frames of {frames.shape[1]}x{frames.shape[2]} at scale {scale} are {h}x{w}; expected"
            " even sides"
        )
    big = (_yuv420(f.repeat(scale, 0).repeat(scale, 1)) for f in frames)
    tags = {"comment": _note(info)} if info else {}
    # The index stands before the frames, so that a page can show a clip that it has not loaded yet.
    # Without mbtree=0, x264 makes other bytes of the same frames from run to run, at most widths.
    _encode(
        path,
        "mp4",
        {"movflags": "+faststart"},
        tags,
        big,
        (h, w),
        fps,
        "libx264",
        "yuv420p",
        {"crf": CRF, "x264-params": "mbtree=0"},
    )


def write_lossless(path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None) -> None:
    """FFV1 in Matroska, bit by bit what came. ``frames``: uint8 [T, h, w, 3]. Raises ``ValueError``
    for other frames."""
    frames = _frames(frames)
    tags = {COUNT: str(len(frames)), **({"comment": _note(info)} if info else {})}
    _encode(
        path, "matroska", {}, tags, frames, frames.shape[1:3], fps, "ffv1", "bgr0", {"level": "3"}
    )


def read_video(
    path: str | Path, size: tuple[int, int] | None = None, fps: float | None = None
) -> np.ndarray:
    """Uint8 [T, h, w, 3]. A video that is ``size`` times a whole number is brought to ``size`` (h,
    w) by averaging squares.

    Raises ``GenError`` for what is no video, has no frames, another size or speed, or is damaged or
    cut off anywhere.
    """
    av, path = _av(), _file(path, "video")
    if cut := _cut(path, MOVING):
        raise GenError(f"video {path} is cut off: its header promises {cut}")
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            stream = _stream(av, container, path)
            _same_speed(stream, fps, path)
            stream.codec_context.options = {
                "err_detect": "explode"
            }  # rather than make up what is missing
            frames, packets, broken = [], 0, 0
            for packet in container.demux(stream):
                packets += bool(packet.size) and not packet.is_discard
                broken += packet.is_corrupt
                frames += [_rgb(f, _squares(f, size, path)) for f in packet.decode()]
            stated = max(packets, int(container.metadata.get(COUNT, packets)))
    except av.FFmpegError as error:
        said = getattr(error, "strerror", None) or str(error)
        raise GenError(
            f"video {path} cannot be read: {said}; expected a whole video file such as MP4"
        ) from None
    if broken or len(frames) < stated:
        whole = min(len(frames), stated - broken)
        raise GenError(
            f"video {path} is cut off or damaged: {whole} of {_many(stated, 'frame')} can be read"
        )
    if not frames:
        raise GenError(f"video {path} has no frames; expected at least one")
    return np.stack(frames)


def first_frame(path: str | Path) -> np.ndarray:
    """Uint8 [h, w, 3], without a look at the rest. Raises ``GenError`` if there is none."""
    av, path = _av(), _file(path, "video")
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            for frame in container.decode(_stream(av, container, path)):
                return _rgb(frame, 1)
    except av.FFmpegError as error:
        said = getattr(error, "strerror", None) or error
        raise GenError(
            f"video {path} cannot be read: {said}; expected a video file such as MP4"
        ) from None
    raise GenError(f"video {path} has no frames; expected at least one")


def _encode(path, kind, flags, tags, frames, size, fps, codec, layout, options) -> None:
    """One video stream, on one thread. ``frames``: arrays in the pixel format ``layout``, or rgb24
    for FFV1's own."""
    av = _av()
    with av.open(str(path), "w", format=kind, options=flags) as container:
        container.flags |= av.container.Flags.bitexact.value  # no random ids, no library versions
        container.metadata.update(tags)
        stream = container.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=options
        )
        stream.height, stream.width, stream.pix_fmt, stream.thread_count = *size, layout, 1
        context = stream.codec_context
        if layout == "yuv420p":
            context.color_primaries = context.color_trc = context.colorspace = (
                context.color_range
            ) = BT709
        for i, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(array), format="rgb24" if array.ndim == 3 else layout
            )
            frame = frame.reformat(format=layout)  # from rgb24: the same bytes in another order
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _frames(frames: Any) -> np.ndarray:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(
            f"the frames are {frames.dtype} {frames.shape}; expected uint8 [T, h, w, 3]"
        )
    return frames


def _stream(av: ModuleType, container: Any, path: Path) -> Any:
    """The moving picture of a container. Raises ``GenError`` if it has none; a still picture or a
    cover is none."""
    name = container.format.name
    if name in IMAGES or name.endswith("_pipe"):
        raise GenError(
            f"video {path} is a picture ({name.removesuffix('_pipe')}); expected a video file such"
            " as MP4"
        )
    cover = av.stream.Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & cover]
    if (
        not streams or streams[0].codec_context is None
    ):  # none for an encoding that the library does not know
        held = sorted({s.type for s in container.streams}) or ["nothing"]
        raise GenError(
            f"video {path} has no moving picture, only {' and '.join(held)}; expected a video"
        )
    return streams[0]


def _same_speed(stream: Any, fps: float | None, path: Path) -> None:
    found = stream.average_rate
    if fps is not None and (found is None or abs(found - Fraction(fps)) > Fraction(fps) / 100):
        raise GenError(
            f"video {path} has {float(found or 0):g} frames per second; expected {fps:g}. Convert"
            f" it, for example with: ffmpeg -i in.mp4 -r {fps:g} out.mp4"
        )


def _squares(frame: Any, size: tuple[int, int] | None, path: Path) -> int:
    """The side of the squares of pixels that become one pixel of ``size``."""
    if size is None:
        return 1
    k = frame.height // size[0]
    if k < 1 or (frame.height, frame.width) != (size[0] * k, size[1] * k):
        raise GenError(
            f"video {path} is {frame.width}x{frame.height} (width x height); expected"
            f" {size[1]}x{size[0]} or a whole multiple. Convert it, for example with: ffmpeg -i"
            f" in.mp4 -vf scale={size[1]}:{size[0]} out.mp4"
        )
    return k


# Limited-range BT.709, as a matrix from RGB in [0, 255] to Y, Cb and Cr, and where these have their
# zero. In numpy, since
# FFmpeg's scaler rounds differently from one processor to the next, and is up to 18 of 255 off at
# the edge of a square.
_KR, _KB = 0.2126, 0.0722
_LUMA = np.array([_KR, 1 - _KR - _KB, _KB])
_YUV = np.stack(
    [_LUMA, ([0, 0, 1] - _LUMA) / (1 - _KB) / 2, ([1, 0, 0] - _LUMA) / (1 - _KR) / 2]
) * [[219 / 255], [224 / 255], [224 / 255]]
_ZERO = np.array([16.0, 128.0, 128.0])


def _yuv420(frame: np.ndarray) -> np.ndarray:
    """Uint8 [h, w, 3] -> the planes Y, Cb and Cr under each other, uint8 [h * 3 / 2, w]."""
    w = frame.shape[1]
    yuv = frame @ _YUV.T + _ZERO
    planes = yuv[..., 0], *_mean(yuv[..., 1:], 2).transpose(2, 0, 1)
    return np.concatenate([np.rint(p).astype(np.uint8).ravel() for p in planes]).reshape(-1, w)


def _rgb(frame: Any, k: int) -> np.ndarray:
    """A decoded frame with squares of ``k`` pixels averaged: uint8 [h / k, w / k, 3]."""
    ours = frame.format.name == "yuv420p" and frame.colorspace == frame.color_range == BT709
    if (
        not ours or k % 2
    ):  # then the colours lie across the borders of squares, and the library has to spread them
        return np.rint(_mean(frame.to_ndarray(format="rgb24"), k)).astype(np.uint8)
    h, w = frame.height, frame.width
    flat = frame.to_ndarray()
    luma, chroma = flat[:h], flat[h:].reshape(2, h // 2, w // 2).transpose(1, 2, 0)
    yuv = np.concatenate([_mean(luma[..., None], k), _mean(chroma, k // 2)], -1)
    return np.clip(np.rint((yuv - _ZERO) @ np.linalg.inv(_YUV).T), 0, 255).astype(np.uint8)


def _mean(image: np.ndarray, k: int) -> np.ndarray:
    """Means of squares of ``k`` by ``k``: [h, w, c] -> float64 [h / k, w / k, c]."""
    h, w, c = image.shape
    return image.reshape(h // k, k, w // k, k, c).mean((1, 3))


# --- Both


def read_info(path: str | Path) -> dict[str, Any]:
    """What a file says of its making: the ``info`` it was written with, or ``{}``. Raises
    ``GenError`` if it cannot be read."""
    path = _file(path, "file")
    with path.open("rb") as file:
        riff = file.read(4) == b"RIFF"
    if riff:
        said = _riff_comment(path)
    else:
        av = _av()
        try:
            with av.open(str(path), metadata_errors="replace") as container:
                tags = {k.lower(): v for k, v in container.metadata.items()}
                said = tags.get("comment", "")
        except av.FFmpegError as error:
            raise GenError(
                f"file {path} cannot be read: {error}; expected sound or video"
            ) from None
    try:
        info = json.loads(said) if said else {}
    except ValueError:
        return {"comment": said}  # someone else's
    return info if isinstance(info, dict) else {"comment": said}


def _note(info: dict[str, Any]) -> str:
    """In ASCII, since formats differ in what letters they take."""
    return json.dumps(info, sort_keys=True, default=str)


def _add_comment(path: Path, text: str) -> None:
    """Append a comment to a RIFF file. By hand, because libsndfile drops long ones when it writes
    and when it reads."""
    body = text.encode() + b"\0" * (2 - len(text.encode()) % 2)
    chunk = b"INFOICMT" + len(body).to_bytes(4, "little") + body
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.write(b"LIST" + len(chunk).to_bytes(4, "little") + chunk)
        total = file.tell()
        file.seek(4)
        file.write((total - 8).to_bytes(4, "little"))


def _riff_comment(path: Path) -> str:
    with path.open("rb") as file:
        for name, at, size in _parts(path):
            if name == b"LIST":
                file.seek(at)
                body = file.read(size)
                i = 4 if body[:4] == b"INFO" else len(body)
                while i + 8 <= len(body):
                    size = int.from_bytes(body[i + 4 : i + 8], "little")
                    if body[i : i + 4] == b"ICMT":
                        return body[i + 8 : i + 8 + size].rstrip(b"\0").decode("utf-8", "replace")
                    i += 8 + size + size % 2
    return ""


def _cut(path: Path, names: tuple[bytes, ...]) -> str | None:
    """``4096 bytes, and 100 are there``, if one of these parts of the file ends after the file
    itself."""
    total = path.stat().st_size
    short = [
        (size, total - at) for name, at, size in _parts(path) if name in names and at + size > total
    ]
    return f"{short[0][0]} bytes, and {short[0][1]} are there" if short else None


def _parts(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and stated size of the outer parts of a RIFF, AIFF, MP4 or Matroska file; nothing
    of other files.

    A part without a size, as programs write that do not know the end, counts as empty and is the
    last one.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(12)
        order = {b"RIFF": "little", b"RIFX": "big", b"FORM": "big"}.get(first[:4])
        boxes, matroska = (
            first[4:8] in (b"ftyp", b"moov", b"mdat"),
            first[:4] == b"\x1a\x45\xdf\xa3",
        )
        at = 12 if order else 0
        while (order or boxes or matroska) and at + 8 <= total:
            file.seek(at)
            head = file.read(16)
            if order:
                name, start, size = head[:4], at + 8, int.from_bytes(head[4:8], order)
                size, pad = (0, total) if size == 2**32 - 1 else (size, size % 2)
            elif boxes:
                name, size, pad = head[4:8], int.from_bytes(head[:4], "big"), 0
                start = at + (16 if size == 1 else 8)
                size = (int.from_bytes(head[8:], "big") if size == 1 else size) - (start - at)
                size, pad = (0, total) if size < 0 else (size, pad)
            else:
                width = (
                    9 - head[4].bit_length()
                )  # the zeros before the first bit say how many bytes the size has
                name, start, size, pad = (
                    head[:4],
                    at + 4 + width,
                    int.from_bytes(head[4 : 4 + width], "big"),
                    0,
                )
                size &= 2 ** (7 * width) - 1
                size, pad = (0, total) if size == 2 ** (7 * width) - 1 else (size, pad)
            yield name, start, size
            at = start + size + pad


def _file(path: str | Path, what: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise GenError(
            f"{what} {path} {'is a folder' if path.is_dir() else 'does not exist'}; expected a file"
        )
    return path


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
