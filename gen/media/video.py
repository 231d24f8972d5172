"""Read and write video files: H.264, GIF or lossless FFV1 out, the usual containers in.

``gen.media.containers`` states what both directions promise. Frames are read as a player shows
them: turned by the display matrix, with square pixels, over white where they are transparent.
PyAV is imported at first use.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from gen.core.errors import GenError
from gen.core.tables import plural
from gen.media.bounds import MOST_DECODED, MOST_FRAMES, MOST_PIXELS, require_bytes, require_pixels
from gen.media.containers import (
    VIDEO_CHUNKS,
    av_module,
    existing_file,
    info_to_comment,
    opened,
    truncation,
    unreadable,
)
from gen.media.images import image_header, over_white

FORMATS = ("mp4", "gif", "mkv")
CRF = "14"  # H.264 quality: visually lossless, measurably not
FRAME_COUNT_TAG = "NUMBER_OF_FRAMES"  # Matroska tag with the number of frames
KEPT_BYTES = 1 << 27  # of a clip that is decoded once
BT709 = 1  # the number of these primaries, this curve and this matrix in every video standard
# image formats that FFmpeg opens as videos, beside those that end in "_pipe"
IMAGE_FORMATS = ("image2", "tty")


# --- Writing


def write_video(
    path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None, scale: int = 1
) -> None:
    """Write frames in the format of the extension: MP4 (H.264), GIF or MKV (lossless FFV1).

    Args:
        path: Output file.
        frames: Uint8 [T, h, w, 3].
        fps: Frames per second. A GIF rounds the time of a frame to 10 ms.
        info: JSON-serialisable metadata, stored as the comment.
        scale: Each pixel of an MP4 or GIF becomes a square of ``scale`` by ``scale`` pixels.

    Raises:
        ValueError: Frames that the format cannot store.
        GenError: Another extension.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix == "mp4":
        write_mp4(path, frames, fps, info, scale)
    elif suffix == "gif":
        write_gif(path, frames, fps, info, scale)
    elif suffix == "mkv":
        write_lossless(path, frames, fps, info)
    else:
        raise GenError(f"video {path.name} ends in .{suffix}; expected .{', .'.join(FORMATS)}")


def write_gif(
    path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None, scale: int = 1
) -> None:
    """Write a GIF that repeats; a frame has 256 colours.

    Args:
        path: Output file.
        frames: Uint8 [T, h, w, 3].
        fps: Frames per second; the time of a frame is rounded to 10 ms.
        info: JSON-serialisable metadata, stored as the comment.
        scale: Each pixel becomes a square of ``scale`` by ``scale`` pixels.

    Raises:
        ValueError: Other frames.
    """
    large = _checked_frames(frames).repeat(scale, 1).repeat(scale, 2)
    images = [Image.fromarray(frame) for frame in large]
    images[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=max(10, round(100 / fps) * 10),
        loop=0,
        comment=info_to_comment(info).encode() if info else b"",
    )


def write_mp4(
    path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None, scale: int = 1
) -> None:
    """Write an H.264 file that browsers play.

    Args:
        path: Output file.
        frames: Uint8 [T, h, w, 3].
        fps: Frames per second.
        info: JSON-serialisable metadata, stored as the comment.
        scale: Every pixel becomes a square of ``scale`` by ``scale`` pixels.

    Raises:
        ValueError: Other frames, or sides that are odd after scaling, which 4:2:0 cannot store.
    """
    frames = _checked_frames(frames)
    h, w = (side * scale for side in frames.shape[1:3])
    if scale < 1 or h % 2 or w % 2:
        raise ValueError(
            f"frames of {frames.shape[1]}x{frames.shape[2]} at scale {scale} are {h}x{w}; expected"
            " even sides"
        )
    scaled = (_rgb_to_yuv420(f.repeat(scale, 0).repeat(scale, 1)) for f in frames)
    tags = {"comment": info_to_comment(info)} if info else {}
    # The index stands before the frames, so that a page can show a clip before it has loaded all
    # of it. Without mbtree=0, x264 makes other bytes of the same frames from run to run.
    _encode(
        path,
        "mp4",
        {"movflags": "+faststart"},
        tags,
        scaled,
        (h, w),
        fps,
        "libx264",
        "yuv420p",
        {"crf": CRF, "x264-params": "mbtree=0"},
    )


def write_lossless(path: Path, frames: Any, fps: float, info: dict[str, Any] | None = None) -> None:
    """Write FFV1 in Matroska, bit-identical to the input.

    Args:
        path: Output file.
        frames: Uint8 [T, h, w, 3].
        fps: Frames per second.
        info: JSON-serialisable metadata, stored as the comment.

    Raises:
        ValueError: Other frames.
    """
    frames = _checked_frames(frames)
    tags = {FRAME_COUNT_TAG: str(len(frames))}
    if info:
        tags["comment"] = info_to_comment(info)
    _encode(
        path, "matroska", {}, tags, frames, frames.shape[1:3], fps, "ffv1", "bgr0", {"level": "3"}
    )


def _encode(
    path: Path,
    container_format: str,
    flags: dict[str, str],
    tags: dict[str, str],
    frames: Iterable[np.ndarray],
    size: tuple[int, int],
    fps: float,
    codec: str,
    pixel_format: str,
    options: dict[str, str],
) -> None:
    """Encode one video stream on one thread.

    ``frames`` are planes in ``pixel_format`` (two axes) or RGB images [h, w, 3].
    """
    av = av_module()
    with av.open(str(path), "w", format=container_format, options=flags) as container:
        container.flags |= av.container.Flags.bitexact.value  # no random ids, no library versions
        container.metadata.update(tags)
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = size
        stream.pix_fmt, stream.thread_count = pixel_format, 1
        context = stream.codec_context
        if pixel_format == "yuv420p":
            context.color_primaries = context.color_trc = BT709
            context.colorspace = context.color_range = BT709
        for i, array in enumerate(frames):
            array_format = "rgb24" if array.ndim == 3 else pixel_format
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format=array_format)
            # from rgb24 to bgr0: the same bytes in another order
            frame = frame.reformat(format=pixel_format)
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _checked_frames(frames: Any) -> np.ndarray:
    """Return frames as uint8 [T, h, w, 3]. Raises ``ValueError`` for anything else."""
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(
            f"the frames are {frames.dtype} {frames.shape}; expected uint8 [T, h, w, 3]"
        )
    return frames


# --- Reading


def read_video(
    path: str | Path,
    size: tuple[int, int] | None = None,
    fps: float | None = None,
) -> np.ndarray:
    """Read a video as it is shown.

    Of a large clip only the chosen frames are kept, in a second pass; the first one finds their
    times.

    Args:
        path: Input file.
        size: Expected (h, w). A video of a whole multiple is reduced by averaging squares.
        fps: Frames per second of the result (``frames_at``); None returns every frame.

    Returns:
        Uint8 [T, h, w, 3].

    Raises:
        GenError: A file that is no video, has no frames, another size, is damaged or truncated
            anywhere, or larger than the bounds (``gen.media.bounds``); where a rate is asked for,
            one without time stamps, or too long.
    """
    if Path(path).suffix.lower() == ".webp":
        return _animated(existing_file(path, "video"), size, fps)
    av_module()
    path = existing_file(path, "video")
    if missing := truncation(path, VIDEO_CHUNKS):
        raise GenError(f"video {path} is cut off: its header promises {missing}")
    if fps is None:
        return np.stack(list(_decoded(path, size, None).frames.values()))
    clip = _decoded(path, size, None, drops=True)
    if None in clip.times:
        raise GenError(f"video {path} has frames without a time; expected a time stamp of each")
    length = max(clip.end, *clip.times) - clip.times[0]
    if length * fps > MOST_FRAMES:
        raise GenError(
            f"video {path} lasts {length:g} s; expected at most {MOST_FRAMES / fps:g} s,"
            f" {MOST_FRAMES} frames at {fps:g} per second"
        )
    chosen = frames_at(fps, clip.times, clip.end, clip.unit)
    stack = _Stack(chosen, f"video {path}")
    if clip.frames:
        for number in stack.slots:
            stack[number] = clip.frames[number]
    else:
        _decoded(path, size, set(chosen), into=stack)
    return stack.array


class _Stack:
    """Chosen frames in one array, which takes each as it is decoded: memory holds them once.

    Attributes:
        slots: indices of the array that a frame goes to, by its number.
        array: uint8 [T, h, w, 3]; empty before there is a frame.
    """

    def __init__(self, chosen: Sequence[int], said: str):
        self.slots: dict[int, list[int]] = {}
        for slot, number in enumerate(chosen):
            self.slots.setdefault(number, []).append(slot)
        self.array, self._count, self._said = np.empty(0, np.uint8), len(chosen), said

    def __setitem__(self, number: int, frame: np.ndarray) -> None:
        """Take a frame. Raises ``GenError`` where all of them are larger than the bounds."""
        if not self.array.size:
            require_bytes(self._said, self._count * frame.nbytes, _spelled(self._count, frame))
            self.array = np.empty((self._count, *frame.shape), np.uint8)
        self.array[self.slots[number]] = frame


@dataclass
class _Decoded:
    """Frames of a clip by number, as they are shown, and when they begin.

    Attributes:
        times: begin of every frame in seconds; None for an unknown one.
        end: end of the last frame in seconds.
        unit: step of the time stamps in seconds.
    """

    frames: dict[int, np.ndarray]
    times: list[float | None]
    end: float
    unit: float


def _decoded(
    path: Path,
    size: tuple[int, int] | None,
    wanted: Container[int] | None,
    drops: bool = False,
    into: _Stack | None = None,
) -> _Decoded:
    """Decode a clip whole, and keep the frames with the ``wanted`` numbers; None keeps all.

    ``drops``: keep none of a clip of more than ``KEPT_BYTES``. ``into``: takes the frames. Raises
    ``GenError`` for a clip that is damaged, or larger than the bounds.
    """
    av, said = av_module(), f"video {path}"
    clip, kept, count, packets, corrupt = _Decoded({}, [], 0.0, 0.0), 0, 0, 0, 0
    try:
        with opened(path) as container:
            stream = _video_stream(av, container, path)
            require_pixels(said, stream.width, stream.height)
            # an error, where the decoder would otherwise invent missing data
            options = {"err_detect": "explode", "max_pixels": str(MOST_PIXELS)}
            stream.codec_context.options = options
            for packet in container.demux(stream):
                packets += bool(packet.size) and not packet.is_discard
                corrupt += packet.is_corrupt
                for frame in packet.decode():
                    _require_few(said, len(clip.times) + 1, frame)
                    if not (drops and kept > KEPT_BYTES) and (wanted is None or count in wanted):
                        shown = _shown(frame, stream.sample_aspect_ratio, size, path)
                        (clip.frames if into is None else into)[count] = shown
                        kept += shown.nbytes
                        if wanted is None and not drops:
                            most = max(stream.frames, count + 1)  # by the header, if it says so
                            require_bytes(said, most * shown.nbytes, _spelled(most, shown))
                    count += 1
                    clip.times.append(frame.time)
                if packet.pts is not None and packet.duration:
                    clip.end = max(
                        clip.end, float((packet.pts + packet.duration) * stream.time_base)
                    )
            clip.unit = float(stream.time_base)
            told = container.metadata.get(FRAME_COUNT_TAG, "")
            stated = max(packets, int(told) if told.isascii() and told.isdigit() else 0)
    except GenError:
        raise
    except (av.FFmpegError, ArithmeticError, TypeError, ValueError) as error:
        raise unreadable(f"video {path}", error, "a whole video file such as MP4") from None
    if corrupt or count < stated:
        whole = min(count, stated - corrupt)
        raise GenError(
            f"video {path} is cut off or damaged: {whole} of {plural(stated, 'frame')} can be read"
        )
    if not count:
        raise GenError(f"video {path} has no frames; expected at least one")
    if drops and kept > KEPT_BYTES:
        clip.frames.clear()
    return clip


def _require_few(said: str, count: int, frame: Any) -> None:
    """Raise ``GenError`` for more frames than are decoded of one clip."""
    require_pixels(said, frame.width, frame.height)
    most = min(MOST_FRAMES, MOST_DECODED // max(1, frame.width * frame.height))
    if count > most:
        raise GenError(
            f"{said} has more than {most:,} frames of {frame.width}x{frame.height}; expected at"
            " most so many"
        )


def _spelled(count: int, frame: np.ndarray) -> str:
    """Format ``900 frames of 1920x1080``."""
    return f"{plural(count, 'frame')} of {frame.shape[1]}x{frame.shape[0]}"


def _animated(path: Path, size: tuple[int, int] | None, fps: float | None) -> np.ndarray:
    """Read an animated WebP, which FFmpeg does not, as ``read_video`` does. Raises ``GenError``."""
    frames, times, time = [], [], 0.0
    try:
        with Image.open(path, formats=["WEBP"]) as image:
            for frame in ImageSequence.Iterator(image):
                _require_few(f"video {path}", len(frames) + 1, frame)
                k = _reduction(frame.height, frame.width, size, path)
                pixels = over_white(np.asarray(frame.convert("RGBA")))
                frames.append(np.rint(_mean_squares(pixels, k)).astype(np.uint8))
                kept = len(frames) * frames[0].nbytes
                require_bytes(f"video {path}", kept, _spelled(len(frames), frames[0]))
                times.append(time)
                time += frame.info.get("duration", 0) / 1000
    except (GenError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise GenError(f"video {path} cannot be read: {error}; expected a whole WebP") from None
    if len(frames) < 2:
        raise GenError(f"video {path} is an image (webp); expected a video file such as MP4")
    if fps is None:
        return np.stack(frames)
    if time * fps > MOST_FRAMES:
        raise GenError(f"video {path} lasts {time:g} s; expected at most {MOST_FRAMES / fps:g} s")
    return np.stack([frames[i] for i in frames_at(fps, times, time, 1e-3)])


def clip_header(path: Path) -> tuple[tuple[int, int], float, float]:
    """Return width and height, seconds and mean frames per second of a clip (0 where they are not
    stated), from its header alone and before it is turned. Raises ``GenError``."""
    if path.suffix.lower() == ".webp":
        return image_header(path).size, 0.0, 0.0
    av = av_module()
    try:
        with opened(existing_file(path, "video")) as container:
            stream = _video_stream(av, container, path)
            seconds = (container.duration or 0) / av.time_base
            return (stream.width, stream.height), seconds, float(stream.average_rate or 0)
    except av.FFmpegError as error:
        raise unreadable(f"video {path}", error, "a video file such as MP4") from None


def frames_at(fps: float, times: Sequence[float], end: float, unit: float) -> list[int]:
    """Choose the frames that a clip shows at the ticks 0, 1 / fps, 2 / fps, ...

    A clip whose frames each begin within half a tick of their own tick, and which is not half a
    tick longer, keeps them all. Of any other clip, the frame of a tick is the last one that has
    begun.

    Args:
        fps: Ticks per second.
        times: Begin of every frame in seconds, rising.
        end: End of the last frame in seconds; one before its begin stands for an unknown one.
        unit: Step of the time stamps in seconds, which are rounded to it.

    Returns:
        Numbers of frames, one per tick, at least one.
    """
    begins, count = np.maximum.accumulate(np.array(times) - times[0]), len(times)
    if end <= times[-1]:
        end = times[-1] + (begins[-1] / (count - 1) if count > 1 else 1 / fps)
    length = end - times[0]
    is_own_rate = (np.abs(begins * fps - np.arange(count)) < 0.5).all()
    if is_own_rate and length * fps < count + 0.5:
        return list(range(count))
    slack = unit / 2 + 1e-6
    ticks = np.arange(max(1, np.ceil((length - slack) * fps))) / fps
    return (np.searchsorted(begins, ticks + slack, side="right") - 1).tolist()


def middle_frame(path: str | Path) -> np.ndarray:
    """Read the frame in the middle, uint8 [h, w, 3], and ignore the rest; the first one where the
    file does not say how many there are. Raises ``GenError`` if there is none."""
    av, path = av_module(), existing_file(path, "video")
    last = None
    try:
        with opened(path) as container:
            stream = _video_stream(av, container, path)
            require_pixels(f"video {path}", stream.width, stream.height)
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            for number, frame in enumerate(container.decode(stream)):
                _require_few(f"video {path}", number + 1, frame)
                last = frame
                if number >= stream.frames // 2:
                    break
            if last is not None:
                return _shown(last, stream.sample_aspect_ratio, None, path)
    except GenError:
        raise
    except (av.FFmpegError, ArithmeticError, TypeError, ValueError) as error:
        raise unreadable(f"video {path}", error, "a video file such as MP4") from None
    raise GenError(f"video {path} has no frames; expected at least one")


def _video_stream(av: ModuleType, container: Any, path: Path) -> Any:
    """Return the video stream of a container. Raises ``GenError`` for still images and covers."""
    name = container.format.name
    if name in IMAGE_FORMATS or name.endswith("_pipe"):
        raise GenError(
            f"video {path} is an image ({name.removesuffix('_pipe')}); expected a video file such"
            " as MP4"
        )
    cover = av.stream.Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & cover]
    # codec_context is None for an encoding that the library does not know
    if not streams or streams[0].codec_context is None:
        types = sorted({s.type for s in container.streams}) or ["nothing"]
        raise GenError(
            f"video {path} has no video stream, only {' and '.join(types)}; expected a video"
        )
    return streams[0]


def _shown(
    frame: Any, pixel: Fraction | None, size: tuple[int, int] | None, path: Path
) -> np.ndarray:
    """Return a decoded frame as it is shown, uint8 [h, w, 3].

    ``pixel``: width of a pixel over its height; None where it is unknown.
    """
    is_square = not pixel or abs(pixel - 1) < Fraction(1, 100)  # sizes are rounded to whole pixels
    width = frame.width if is_square else max(1, round(frame.width * pixel))
    require_pixels(f"a frame of video {path}", width, frame.height)
    transposed, flips = _turn(frame, path)
    sides = (width, frame.height) if transposed else (frame.height, width)
    k = _reduction(*sides, size, path)
    if is_square:
        rgb = _frame_to_rgb(frame, k)
    else:
        stretched = Image.fromarray(_frame_to_rgb(frame, 1)).resize((width, frame.height))
        rgb = _averaged(np.asarray(stretched), k)
    return np.flip(rgb.swapaxes(0, 1) if transposed else rgb, flips)


def _turn(frame: Any, path: Path) -> tuple[bool, tuple[int, ...]]:
    """Return how a frame is turned upright: whether rows and columns are exchanged, and the axes
    that are flipped then. Raises ``GenError`` for another angle than quarter turns."""
    # `frame.side_data` would tie the frame to itself, and keep it until garbage is collected
    side_data = av_module().sidedata.sidedata.SideDataContainer(frame)
    found = [item for item in side_data if item.type.name == "DISPLAYMATRIX"]
    if not found:
        return False, ()
    # (x, y) of a pixel is shown at (a x + c y, b x + d y)
    a, b, _, c, d = np.frombuffer(bytes(found[0]), np.int32)[:5].astype(float)
    transposed = abs(b) + abs(c) > abs(a) + abs(d)
    to_x, to_y, *rest = (c, b, a, d) if transposed else (a, d, b, c)
    if max(map(abs, rest)) > min(abs(to_x), abs(to_y)) / 100:
        angle = np.degrees(np.arctan2(b, a))
        raise GenError(
            f"video {path} is shown turned by {angle:.0f} degrees; expected a multiple of 90"
        )
    return transposed, tuple(axis for axis, way in ((0, to_y), (1, to_x)) if way < 0)


def _reduction(height: int, width: int, size: tuple[int, int] | None, path: Path) -> int:
    """Return the side of the squares of pixels that are averaged to reach ``size``."""
    if size is None:
        return 1
    k = height // size[0]
    if k < 1 or (height, width) != (size[0] * k, size[1] * k):
        raise GenError(
            f"video {path} is {width}x{height} (width x height); expected"
            f" {size[1]}x{size[0]} or a whole multiple. Convert it, for example with: ffmpeg -i"
            f" in.mp4 -vf scale={size[1]}:{size[0]} out.mp4"
        )
    return k


# --- Colours

# Limited-range BT.709, as a matrix from RGB in [0, 255] to Y, Cb and Cr, and the offsets of these.
# Computed in numpy, since FFmpeg's scaler rounds differently from one processor to the next, and is
# up to 18 of 255 off at the edge of a square.
_KR, _KB = 0.2126, 0.0722
_LUMA = np.array([_KR, 1 - _KR - _KB, _KB])
_RGB_TO_YUV = np.stack(
    [_LUMA, ([0, 0, 1] - _LUMA) / (1 - _KB) / 2, ([1, 0, 0] - _LUMA) / (1 - _KR) / 2]
) * [[219 / 255], [224 / 255], [224 / 255]]
_YUV_OFFSET = np.array([16.0, 128.0, 128.0])


def _rgb_to_yuv420(frame: np.ndarray) -> np.ndarray:
    """Stack the planes Y, Cb and Cr: uint8 [h, w, 3] -> uint8 [h * 3 / 2, w]."""
    w = frame.shape[1]
    yuv = frame @ _RGB_TO_YUV.T + _YUV_OFFSET
    planes = yuv[..., 0], *_mean_squares(yuv[..., 1:], 2).transpose(2, 0, 1)
    return np.concatenate([np.rint(p).astype(np.uint8).ravel() for p in planes]).reshape(-1, w)


def _frame_to_rgb(frame: Any, k: int) -> np.ndarray:
    """Convert a decoded frame to RGB uint8 [h / k, w / k, 3], averaging squares of ``k`` pixels."""
    is_own_format = frame.format.name == "yuv420p" and (
        frame.colorspace == frame.color_range == BT709
    )
    if any(component.is_alpha for component in frame.format.components):
        rgb = over_white(frame.to_ndarray(format="rgba"))
        return _averaged(rgb, k)
    # with an odd k, chroma samples straddle the squares, and the library has to interpolate them
    if not is_own_format or k % 2:
        return _averaged(frame.to_ndarray(format="rgb24"), k)
    h, w = frame.height, frame.width
    planes = frame.to_ndarray()
    luma, chroma = planes[:h], planes[h:].reshape(2, h // 2, w // 2).transpose(1, 2, 0)
    yuv = np.concatenate([_mean_squares(luma[..., None], k), _mean_squares(chroma, k // 2)], -1)
    rgb = (yuv - _YUV_OFFSET) @ np.linalg.inv(_RGB_TO_YUV).T
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)


def _averaged(image: np.ndarray, k: int) -> np.ndarray:
    """Average squares of ``k`` by ``k`` pixels: uint8 [h, w, c] -> uint8 [h / k, w / k, c]."""
    return image if k == 1 else np.rint(_mean_squares(image, k)).astype(np.uint8)


def _mean_squares(image: np.ndarray, k: int) -> np.ndarray:
    """Average squares of ``k`` by ``k`` pixels: [h, w, c] -> float64 [h / k, w / k, c]."""
    h, w, c = image.shape
    return image.reshape(h // k, k, w // k, k, c).mean((1, 3))
