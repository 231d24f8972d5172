"""Video files are read as a player shows them: turned, in the shape of their pixels, and one frame
per tick of the rate that a model has."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.jobs.given import kept_parts
from gen.media.containers import read_info
from gen.media.given import data_uri, read_media
from gen.media.video import frames_at, middle_frame, read_video, write_gif, write_lossless
from gen.media.video import write_mp4 as write_h264
from gen.modalities.open_vocabulary import FreeVideo
from gen.modalities.video.modality import VideoModality
from gen.serve.api.media import given_file
from gen.training.sources import Source, read_source

av = pytest.importorskip("av")
SHAPE = (32, 32, 3)


def numbered(count: int, step: int = 5) -> np.ndarray:
    """Frames whose level says their number."""
    levels = np.arange(count, dtype=np.uint8) * step
    return np.broadcast_to(levels[:, None, None, None], (count, *SHAPE)).copy()


def numbers(clip: np.ndarray, step: int = 5) -> list[int]:
    return np.rint(clip.reshape(len(clip), -1).mean(1) / step).astype(int).tolist()


def write_at(path: Path, frames: np.ndarray, milliseconds: list[int], kind: str = "bgr0") -> None:
    """Write frames of 3 or 4 channels, lossless, each with a time of its own."""
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=1000)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.time_base = kind, Fraction(1, 1000)
        for pixels, time in zip(frames, milliseconds, strict=True):
            given = "rgba" if pixels.shape[-1] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=given)
            frame = frame.reformat(format=kind)
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def shown_at(times: list[float], end: float, fps: float) -> list[int]:
    """The frame that a player shows at each tick, found by looking at all of them."""
    ticks = []
    while len(ticks) / fps < end - 1e-9:
        now = len(ticks) / fps + 1e-9
        ticks.append(max(i for i, time in enumerate(times) if time <= now))
    return ticks


# --- Frame rate


@pytest.mark.parametrize("write", [write_lossless, write_h264])
def test_a_clip_at_the_rate_of_the_model_keeps_its_frames(write, tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), dtype=np.uint8)
    write(tmp_path / "a", frames, 8)
    every = read_video(tmp_path / "a")
    assert np.array_equal(read_video(tmp_path / "a", fps=8), every)
    assert np.array_equal(VideoModality().load(tmp_path / "a"), every)
    assert write is write_h264 or np.array_equal(every, frames)


RATES = [1, 2, 4, 7.5, 10, 12, 16, 23.976, 24, 25, 29.97, 30, 50, 60, 120, 240]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("write", [write_lossless, write_h264])
def test_a_clip_of_another_rate_has_the_frame_of_every_tick(rate, write, tmp_path):
    write(tmp_path / "a", numbered(48), rate)
    exact = float(Fraction(rate).limit_denominator(1001))
    expected = shown_at([i / exact for i in range(48)], 48 / exact, 8)
    found = numbers(read_video(tmp_path / "a", fps=8))
    # a time in whole milliseconds may lie on either side of a tick
    assert len(found) - len(expected) in (0, 1) and found[0] == 0 and found[-1] <= 47
    differ = [(a, b) for a, b in zip(found, expected, strict=False) if a != b]
    assert all(a == b + 1 for a, b in differ) and len(differ) <= (rate in (7.5, 23.976, 29.97)) * 6
    assert found != list(range(48))  # control


def test_a_fast_clip_is_not_a_slow_one(tmp_path):
    write_lossless(tmp_path / "slow.mkv", numbered(16), 8)
    write_lossless(tmp_path / "fast.mkv", numbered(16), 240)
    load = VideoModality().load
    assert numbers(load(tmp_path / "slow.mkv")) == list(range(16))
    assert numbers(load(tmp_path / "fast.mkv")) == [0]  # 67 ms: one tick of 125 ms


@pytest.mark.parametrize(
    "times, expected",
    [
        ([0, 500, 625, 1000], [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3]),
        ([0, 10, 20, 30, 1000], [0, 3, 3, 3, 3, 3, 3, 3, 4, 4]),
        ([700, 825, 950, 1075], [0, 1, 2, 3]),  # starts later, at the rate of the model
        ([0, 130, 240, 380, 495, 630], [0, 1, 2, 3, 4, 5]),  # jitters around it
        ([0, 124, 249, 374], [0, 1, 2, 3]),
        ([0, 250, 500], [0, 0, 1, 1, 2, 2]),
    ],
)
def test_a_variable_rate_is_resampled_by_its_times(times, expected, tmp_path):
    write_at(tmp_path / "a.mkv", numbered(len(times)), times)
    found = numbers(read_video(tmp_path / "a.mkv", fps=8))
    assert found[: len(expected)] == expected[: len(found)] and found[-1] == len(times) - 1
    assert abs(len(found) - len(expected)) <= 2  # how long the last frame stays is a guess


def test_a_time_far_away_does_not_fill_the_memory(tmp_path):
    write_at(tmp_path / "a.mkv", numbered(2), [0, 20_000_000])
    assert numbers(read_video(tmp_path / "a.mkv")) == [0, 1]
    with pytest.raises(GenError, match="a.mkv lasts 20000 s; expected at most 12500 s, 100000"):
        read_video(tmp_path / "a.mkv", fps=8)


@pytest.mark.parametrize("fps", [5, 8, 12.5, 24])
def test_frames_of_random_times_are_those_that_a_player_shows(fps):
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 40):
        times = np.cumsum(rng.exponential(0.07, count)).tolist()
        start, end = times[0], times[-1] + 0.05
        expected = shown_at([t - start for t in times], end - start, fps)
        found = frames_at(fps, times, end, 1e-6)
        assert found == expected or found == list(range(count))
        if found != expected:  # every frame lies within half a tick of its own
            assert np.abs((np.array(times) - start) * fps - np.arange(count)).max() < 0.5


def test_equal_frames_that_a_gif_holds_once_are_shown_as_long(tmp_path):
    frames = numbered(16)
    frames[5:11] = frames[5]
    write_gif(tmp_path / "a.gif", frames, 8)
    assert len(read_video(tmp_path / "a.gif")) == 11  # Pillow writes equal frames once
    assert np.array_equal(VideoModality().load(tmp_path / "a.gif"), frames)


def test_containers_without_times_of_frames_have_those_of_their_rate(tmp_path):
    for name, codec, kind in (("a.avi", "ffv1", "bgr0"), ("b.avi", "mpeg4", "yuv420p")):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream(codec, rate=16)
            stream.height, stream.width, stream.pix_fmt = 32, 32, kind
            for pixels in numbered(16, 15):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                container.mux(stream.encode(frame.reformat(format=kind)))
            container.mux(stream.encode(None))
        assert numbers(read_video(tmp_path / name, fps=8), 15) == list(range(0, 16, 2))


# --- Display matrix, shape of pixels, transparency

# (a, b, c, d) of a display matrix -> upright frame of a stored one [h, w, 3]
MATRICES = {
    (1, 0, 0, 1): lambda a: a,
    (0, 1, -1, 0): lambda a: np.rot90(a, -1),  # a quarter turn clockwise
    (-1, 0, 0, -1): lambda a: np.rot90(a, 2),
    (0, -1, 1, 0): lambda a: np.rot90(a, 1),
    (-1, 0, 0, 1): lambda a: a[:, ::-1],
    (1, 0, 0, -1): lambda a: a[::-1],
    (0, 1, 1, 0): lambda a: a.swapaxes(0, 1),
    (0, -1, -1, 0): lambda a: a[::-1, ::-1].swapaxes(0, 1),
}


def quarters(height: int = 32, width: int = 64) -> np.ndarray:
    out = np.zeros((height, width, 3), np.uint8)
    out[: height // 2, : width // 2] = (250, 10, 10)
    out[: height // 2, width // 2 :] = (10, 250, 10)
    out[height // 2 :, : width // 2] = (10, 10, 250)
    return out


def turned_mp4(path: Path, frames: np.ndarray, matrix: tuple[float, ...]) -> None:
    """Write an MP4, and a display matrix into the header of its track."""
    write_h264(path, frames, 8)
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44
    a, b, c, d = (round(65536 * x) for x in matrix)
    content[at : at + 36] = np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], ">i4").tobytes()
    path.write_bytes(content)


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_clip_is_upright(matrix, tmp_path):
    stored = quarters()
    turned_mp4(tmp_path / "a.mp4", np.stack([stored] * 3), matrix)
    expected = MATRICES[matrix](stored)
    found = read_video(tmp_path / "a.mp4")
    assert found.shape == (3, *expected.shape)
    assert np.abs(found.astype(int) - expected).mean() < 4
    assert np.array_equal(middle_frame(tmp_path / "a.mp4"), found[1])
    reduced = read_video(tmp_path / "a.mp4", (expected.shape[0] // 4, expected.shape[1] // 4))
    assert np.abs(reduced.astype(int) - expected[2::4, 2::4]).mean() < 6
    wrong = [np.abs(found[0].astype(int) - f(stored)).mean() for f in MATRICES.values()
             if f(stored).shape == expected.shape]  # fmt: skip
    assert sum(w < 4 for w in wrong) == 1  # control


def test_another_angle_is_refused(tmp_path):
    side = 0.5**0.5
    turned_mp4(tmp_path / "a.mp4", numbered(2), (side, side, -side, side))
    with pytest.raises(GenError, match="a.mp4 is shown turned by 45 degrees; expected a multiple"):
        read_video(tmp_path / "a.mp4")


@pytest.mark.parametrize("pixel, width", [(Fraction(2), 128), (Fraction(1, 2), 32), (None, 64)])
def test_pixels_are_square(pixel, width, tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        if pixel is not None:
            stream.codec_context.sample_aspect_ratio = pixel
        frame = av.VideoFrame.from_ndarray(quarters(), format="rgb24").reformat(format="yuv420p")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    found = read_video(path)
    assert found.shape == (1, 32, width, 3)
    inner = (slice(4, None, 8), slice(width // 8, None, width // 4))
    assert np.abs(found[0][inner].astype(int) - quarters(32, width)[inner]).max() < 12
    assert read_video(path, (8, width // 4)).shape == (1, 8, width // 4, 3)


def test_what_is_transparent_in_a_clip_is_over_white(tmp_path):
    pixels = np.zeros((4, 8, 8, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = (200, 0, 100), 255
    pixels[:, :4, :, 3] = 0
    write_at(tmp_path / "a.mkv", pixels, [0, 125, 250, 375], "bgra")
    expected = np.where(pixels[..., 3:] == 0, 255, pixels[..., :3])
    assert np.array_equal(read_video(tmp_path / "a.mkv"), expected)
    first = Image.fromarray(pixels[0])
    first.save(tmp_path / "a.gif")
    assert np.array_equal(read_video(tmp_path / "a.gif")[0], expected[0])


# --- Doors


def test_every_door_resamples_alike(tmp_path):
    path = tmp_path / "fast.mkv"
    write_lossless(path, numbered(32), 16)
    expected = list(range(0, 32, 2))
    modality, content = VideoModality(), path.read_bytes()
    assert numbers(modality.load(path)) == expected
    assert numbers(given_file(modality, content, "video")) == expected
    slow = FreeVideo(SimpleNamespace(fps=4, frame_size=(32, 32)))  # a published checkpoint's rate
    assert numbers(slow.load(path)) == expected[::2]
    for resize in (False, True):
        medium = read_source(Source("fast.mkv", path), modality, resize=resize)[0].media
        assert numbers(medium) == expected
    for given in (path, content, data_uri(content), {"bytes": content}):
        (found,) = Condition.of({"video": given}).media("video", fps=8)
        assert numbers(found.array) == expected
    (array,) = Condition.of({"video": numbered(16)}).media("video", fps=8)
    assert numbers(array.array) == list(range(16))  # an array has the rate of the model


def test_a_job_keeps_the_times_of_a_clip(tmp_path):
    write_lossless(tmp_path / "fast.mkv", numbered(32), 16)
    write_h264(tmp_path / "fast.mp4", numbered(32), 16)
    for name in ("fast.mkv", "fast.mp4"):
        given = Condition.of({"video": (tmp_path / name).read_bytes()})
        (kept,) = kept_parts(given, tmp_path / "job")["video"]
        assert Path(kept).suffix == Path(name).suffix
        assert numbers(read_media(kept, "video", fps=8).array) == list(range(0, 32, 2))
    (kept,) = kept_parts(Condition.of({"video": numbered(16)}), tmp_path / "job")["video"]
    assert numbers(read_media(kept, "video", fps=8).array) == list(range(16))
    with pytest.raises(GenError, match="bytes of video"):
        kept_parts(Condition.of({"video": b"no clip"}), tmp_path / "job")


CONCAT = "ffconcat version 1.0\nfile secret.mkv\n"
HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\nsecret.mp4\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    "name, text", [("list.mp4", CONCAT), ("list.ffconcat", CONCAT), ("list.m3u8", HLS)]
)
def test_playlists_read_no_other_file(tmp_path, name, text):
    write_lossless(tmp_path / "secret.mkv", numbered(2), 8)
    write_h264(tmp_path / "secret.mp4", numbered(2), 8)
    (tmp_path / name).write_text(text)
    with av.open(str(tmp_path / name)) as container:  # the control: FFmpeg by itself does
        assert len(list(container.decode(video=0))) == 2
    for read in (read_video, middle_frame, read_info):
        with pytest.raises(GenError, match="cannot be read"):
            read(tmp_path / name)
    assert numbers(read_video(tmp_path / "secret.mkv")) == [0, 1]
