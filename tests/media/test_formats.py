"""Formats of media files beside the defaults: lossless ones give back what was written, bytes
depend on the content alone, and metadata is in the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
from PIL import Image

from gen.core.errors import GenError
from gen.media.audio import open_sound, write_sound
from gen.media.containers import read_info
from gen.media.images import read_image_info, write_image
from gen.media.video import read_video, write_video

INFO = {"prompt": "a red circle, \u2603", "seed": 3, "job": json.dumps({"a": [1, 2]})}
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
FRAMES = np.repeat(RNG.integers(0, 4, (6, 8, 8, 3), dtype=np.uint8) * 80, 4, 1).repeat(4, 2)
WAVE = np.sin(np.arange(16_000) / 20) * 0.5


def twice(tmp_path, write, name: str):
    """Write a file two times; the bytes are the same."""
    (tmp_path / "again").mkdir(exist_ok=True)
    first, second = tmp_path / name, tmp_path / "again" / name
    write(first), write(second)
    assert first.read_bytes() == second.read_bytes()
    return first


@pytest.mark.parametrize("suffix, is_lossless", [("png", True), ("webp", True), ("jpg", False)])
def test_an_image_keeps_its_pixels_or_nearly_and_its_facts(tmp_path, suffix, is_lossless):
    image = Image.fromarray(PIXELS)
    path = twice(tmp_path, lambda p: write_image(p, image, INFO), f"a.{suffix}")
    back = np.asarray(Image.open(path).convert("RGB")).astype(int)
    worst = np.abs(back - PIXELS).max()
    assert (worst == 0) == is_lossless and worst < 80
    assert {k: str(v) for k, v in read_image_info(path).items()} == {
        k: str(v) for k, v in INFO.items()
    }


def test_a_jpeg_keeps_the_facts_that_fit_into_it(tmp_path):
    info = {"prompt": "x", "job": "y" * 100_000}
    write_image(tmp_path / "a.jpg", Image.fromarray(PIXELS), info)
    assert read_image_info(tmp_path / "a.jpg") == {"prompt": "x"}
    write_image(tmp_path / "a.webp", Image.fromarray(PIXELS), info)
    assert read_image_info(tmp_path / "a.webp") == info


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_keeps_its_samples_or_nearly_and_its_facts(tmp_path, suffix, channels):
    wave = WAVE if channels == 1 else np.stack([WAVE, -WAVE], 1)
    path = twice(tmp_path, lambda p: write_sound(p, wave, 16_000, INFO), f"a.{suffix}")
    assert read_info(path) == INFO
    back, rate = open_sound(path)
    assert rate == 16_000 and back.shape[1] == channels
    if suffix == "mp3":
        n = min(len(back), len(WAVE))
        lag = int(np.argmax(np.correlate(back[:4000, 0], WAVE[:1000], "valid")))
        assert (
            n > 15_000 and np.corrcoef(back[lag + 100 : lag + 9000, 0], WAVE[100:9000])[0, 1] > 0.99
        )
    else:
        assert np.abs(back - wave.reshape(len(wave), -1)).max() <= 2**-15
        assert soundfile.info(path).subtype == "PCM_16"


@pytest.mark.parametrize("suffix", ["mp4", "gif", "mkv"])
def test_a_video_keeps_its_frames_or_nearly_and_its_facts(tmp_path, suffix):
    path = twice(tmp_path, lambda p: write_video(p, FRAMES, 10, INFO), f"a.{suffix}")
    back = read_video(path, fps=10).astype(int)
    assert back.shape == FRAMES.shape
    worst = np.abs(back - FRAMES).max()
    assert worst == 0 if suffix == "mkv" else np.abs(back - FRAMES).mean() < 12
    if suffix != "gif":
        assert read_info(path) == INFO
    else:
        assert json.loads(Image.open(path).info["comment"]) == INFO


def test_other_extensions_are_refused_with_those_that_are_written(tmp_path):
    for write in (
        lambda: write_image(tmp_path / "a.tiff", Image.fromarray(PIXELS), {}),
        lambda: write_sound(tmp_path / "a.ogg", WAVE, 16_000),
        lambda: write_video(tmp_path / "a.avi", FRAMES, 10),
    ):
        with pytest.raises(GenError, match="expected"):
            write()
    with pytest.raises(GenError, match="12345 samples per second"):
        write_sound(tmp_path / "a.mp3", WAVE, 12_345)
    assert not list(tmp_path.iterdir())
