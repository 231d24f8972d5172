"""Media of somebody else: each is read within its bounds or refused in one sentence, and none runs
anything or reads another file."""

from __future__ import annotations

import ast
import errno
import gc
import os
import resource
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from av import FFmpegError, VideoFrame
from av.error import err_check
from bounded import bounded
from foreign import wrong_of_files
from hostile_media import archives, arrays, clips, images, skeletons, sounds

from gen.core.errors import GenError
from gen.media import bounds
from gen.media.audio import _Unlisted, open_sound, sound_header, write_wav
from gen.media.containers import read_info, unreadable
from gen.media.given import read_media
from gen.media.images import image_size, read_image_info
from gen.media.motion.bvh import read_bvh
from gen.media.npz import read_npz
from gen.media.video import _shown, middle_frame, read_video, write_video

FPS = 8.0


def _image(path: Path) -> tuple:
    array = read_media(path, "image").array
    image_size(path)
    read_image_info(path)
    assert array.dtype == np.uint8 and array.size <= 3 * bounds.MOST_PIXELS
    return array.shape


def _sound(path: Path) -> tuple:
    given = read_media(path, "audio")
    assert np.isfinite(given.array).all() and given.array.nbytes <= bounds.MOST_BYTES
    return given.array.shape


def _clip(path: Path) -> tuple:
    array = read_media(path, "video", fps=FPS).array
    assert array.ndim == 4 and array.nbytes <= bounds.MOST_BYTES
    return array.shape


def _array(path: Path) -> tuple:
    try:
        array = bounds.load_array(path)
    except (OSError, ValueError, EOFError) as error:  # as every caller does
        raise GenError(str(error)) from None
    assert not array.dtype.hasobject and array.nbytes <= path.stat().st_size
    return array.shape


KINDS = {
    "images": (images, _image),
    "sounds": (sounds, _sound),
    "clips": (clips, _clip),
    "arrays": (arrays, _array),
    "archives": (archives, lambda path: read_npz(path, ("action",))["action"].shape),
    "skeletons": (skeletons, lambda path: read_bvh(path).root.shape),
}


def wrong_of(kind: str, folder: Path, step: int = 1) -> tuple[int, list[str]]:
    """Read all inputs of a kind. Return their number, and what was wrong."""
    make, read = KINDS[kind]
    inputs = list(make(folder / "canary").items())[::step]
    wrong = wrong_of_files({name: (name, data) for name, data in inputs}, read, folder)
    return len(inputs), wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_read_within_its_bounds_or_refused(kind, tmp_path):
    count, wrong = wrong_of(kind, tmp_path)
    print(f"{count} {kind}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["images", "arrays", "skeletons"])
def test_some_inputs_are_read_within_their_bounds_or_refused(kind, tmp_path):
    count, wrong = wrong_of(kind, tmp_path, 9)
    assert count and not wrong, "\n".join(wrong)


SIGNED = ("back.wav", "inner.wav")


@pytest.mark.parametrize("name", SIGNED)
def test_lists_do_not_send_the_reader_of_sounds_back(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(sounds(tmp_path)[name])
    for read in (open_sound, sound_header):
        ended = bounded(lambda r=read: r(path))
        assert ended.how in ("returned", "refused"), ended


@pytest.mark.parametrize("name", SIGNED)
def test_control_without_other_names_the_lists_are_read_for_ever(name, tmp_path, monkeypatch):
    monkeypatch.setattr(_Unlisted, "read", lambda self, count: self.file.read(count))
    path = tmp_path / name
    path.write_bytes(sounds(tmp_path)[name])
    assert bounded(lambda: open_sound(path), seconds=3).how == "hung"


@pytest.mark.parametrize("count", range(1, 13))
def test_a_list_is_renamed_wherever_a_read_begins_and_ends(count, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"LIST..LIST.LISTLISTLIS")
    with path.open("rb") as file:
        source, parts = _Unlisted(file), []
        while part := source.read(count):
            parts.append(part)
        assert b"".join(parts) == b"JUNK..JUNK.JUNKJUNKLIS"
        source.is_hidden = False
        source.seek(-1)  # stays at the end
        assert source.tell() == 22
        source.seek(0)
        assert source.read(22) == path.read_bytes()


def test_samples_that_spell_a_list_are_kept(tmp_path):
    samples = np.frombuffer(b"LIST" * 500, np.int16)
    path = tmp_path / "a.wav"
    write_wav(path, samples / 2**15, 8000, {"title": "LIST"})
    wave, rate = open_sound(path)
    assert rate == 8000 and (np.rint(wave[:, 0] * 2**15) == samples).all()
    assert sound_header(path) == (len(samples) / 8000, 8000, 1)
    assert read_info(path) == {"title": "LIST"}


PLACES = {
    "pipe": os.mkfifo,
    "device": lambda path: os.symlink("/dev/zero", path),
    "loop": lambda path: os.symlink(path, path),
    "dangling": lambda path: os.symlink("nowhere", path),
    "folder": os.mkdir,
    "missing": lambda path: None,
}
SUFFIXES = {"images": "png", "sounds": "wav", "clips": "mp4", "arrays": "npy", "archives": "npz",
            "skeletons": "bvh"}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(kind, place, tmp_path):
    path = tmp_path / f"a.{SUFFIXES[kind]}"
    PLACES[place](path)
    ended = bounded(lambda: KINDS[kind][1](path), seconds=5)
    assert ended.how == "refused" and "a." in ended.said, ended


# --- controls: a broken guard is seen


def test_without_its_guard_a_pickle_runs(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "a.npy"
    path.write_bytes(arrays(canary)["object.npy"])
    bounded(lambda: np.load(path, allow_pickle=True))
    assert canary.exists()


def test_without_its_guard_an_array_fills_the_memory(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(arrays(tmp_path)["huge.npy"])
    assert bounded(lambda: np.load(path)).how != "returned"
    with pytest.raises(GenError, match="expected at most"):
        bounds.load_array(path)


def test_without_its_guard_a_bomb_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(images(tmp_path)["just-over.png"])
    with pytest.raises(GenError, match="8001x8000 pixels"):
        read_media(path, "image")
    monkeypatch.setattr("gen.media.images.require_pixels", lambda *_: None)
    with pytest.raises(GenError, match="truncated|broken|incomplete|cut"):  # it went on decoding
        read_media(path, "image")


def test_a_large_clip_keeps_what_is_taken(tmp_path, monkeypatch):
    """A second pass gives the frames that one pass gives."""
    frames = np.random.default_rng(1).integers(0, 255, (40, 16, 16, 3), np.uint8)
    write_video(tmp_path / "a.mkv", frames, 20.0)
    once = read_video(tmp_path / "a.mkv", fps=8.0)
    monkeypatch.setattr("gen.media.video.KEPT_BYTES", 1000)
    assert (read_video(tmp_path / "a.mkv", fps=8.0) == once).all() and len(once) == 16
    monkeypatch.setattr("gen.media.bounds.MOST_BYTES", 3000)
    for how in ({}, {"fps": 8.0}):
        with pytest.raises(GenError, match="expected at most 3,000"):
            read_video(tmp_path / "a.mkv", **how)
    assert middle_frame(tmp_path / "a.mkv").shape == (16, 16, 3)


# --- a long clip of large frames

LARGE = (1080, 1920)


def shade(second: int) -> int:
    """The grey of all frames of a second."""
    return 20 + 7 * second


@pytest.fixture(scope="module")
def long_clip(tmp_path_factory):
    """A clip of 900 frames of 1080p in 30 seconds, each second of one grey: 5.6 GB of pixels."""
    path = tmp_path_factory.mktemp("long") / "a.mp4"
    # an encoder of this process would have threads that the forked readers lack
    ended = bounded(lambda: encode(path), seconds=300)
    assert ended.how == "returned", ended
    return path


def encode(path: Path) -> None:
    """Write the clip frame by frame."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.height, stream.width = LARGE
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        for number in range(900):
            frame = av.VideoFrame(LARGE[1], LARGE[0], "yuv420p")
            for plane, value in zip(frame.planes, (shade(number // 30), 128, 128), strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_and_measured(path: Path, fps: float | None) -> tuple:
    """Read a clip; return its shape, the grey of every frame, and megabytes of memory."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    frames = read_video(path, fps=fps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert (frames == frames[:, :1, :1, :1]).all()
    return frames.shape, frames[:, 0, 0, 0].tolist(), peak >> 20


@pytest.mark.slow
@pytest.mark.parametrize("fps", [1.0, 2.0])
def test_a_long_clip_of_large_frames_is_read_within_a_part_of_its_size(long_clip, fps):
    ended = bounded(lambda: read_and_measured(long_clip, fps), seconds=120, memory=4 << 30)
    assert ended.how == "returned", ended
    shape, greys, peak = ast.literal_eval(ended.said)
    count = int(30 * fps)
    print(f"{count} frames, {peak} MB, {ended.seconds:.1f} s")
    assert shape == (count, *LARGE, 3) and peak < 120 + 6.3 * count  # the frames that are kept
    shown = [round((shade(int(i / fps)) - 16) * 255 / 219) for i in range(count)]  # of video levels
    assert np.abs(np.array(greys) - shown).max() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("fps", [None, 8.0])
def test_more_of_it_than_memory_should_hold_is_refused(long_clip, fps):
    ended = bounded(lambda: read_and_measured(long_clip, fps), seconds=120)
    assert ended.how == "refused" and "expected at most 1,073,741,824" in ended.said, ended


@pytest.mark.slow
def test_without_its_bounds_the_clip_fills_the_memory(long_clip, monkeypatch):
    monkeypatch.setattr("gen.media.video.KEPT_BYTES", 1 << 40)
    monkeypatch.setattr("gen.media.bounds.MOST_BYTES", 1 << 40)
    ended = bounded(lambda: read_and_measured(long_clip, 1.0), seconds=120)
    # FFmpeg itself may take its lack of memory for a damaged file
    assert ended.how in ("memory", "died", "refused"), ended
    assert "expected at most" not in ended.said, ended


def frames_alive(path: Path) -> tuple[int, int]:
    """Read a clip without collection of garbage; return how many frames and threads are left."""
    read_video(path)
    gc.collect()
    gc.disable()
    threads = len(os.listdir("/proc/self/task"))
    read_video(path)
    read_video(path, fps=8.0)
    middle_frame(path)
    alive = sum(isinstance(thing, VideoFrame) for thing in gc.get_objects())
    return alive, len(os.listdir("/proc/self/task")) - threads


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "gif"])
def test_frames_and_their_threads_end_with_the_reading(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    write_video(path, np.random.default_rng(1).integers(0, 255, (10, 16, 16, 3), np.uint8), 20.0)
    assert bounded(lambda: frames_alive(path)).said == "(0, 0)"


def test_control_frames_with_their_side_data_stay(tmp_path, monkeypatch):
    path = tmp_path / "a.mkv"
    write_video(path, np.zeros((10, 16, 16, 3), np.uint8), 20.0)
    kept = SimpleNamespace(SideDataContainer=lambda frame: frame.side_data)
    monkeypatch.setattr("av.sidedata.sidedata", kept)
    alive, _ = ast.literal_eval(bounded(lambda: frames_alive(path)).said)
    assert alive >= 20


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EIO])
def test_a_lack_of_memory_is_not_said_to_be_the_fault_of_the_file_alone(code):
    with pytest.raises(FFmpegError) as raised:
        err_check(-code)
    said = str(unreadable("video a.mp4", raised.value, "a video file"))
    assert ("memory is short" in said) == (code != errno.EIO) and "video a.mp4" in said


@pytest.mark.parametrize("pixel", [2**31, 10**6])
def test_a_frame_of_wide_pixels_is_bounded(pixel):
    frame = VideoFrame(16, 16, "rgb24")
    with pytest.raises(GenError, match=f"a frame of video a.mkv has {16 * pixel}x16 pixels"):
        _shown(frame, Fraction(pixel), None, Path("a.mkv"))
    assert _shown(frame, Fraction(4), None, Path("a.mkv")).shape == (16, 64, 3)
