"""Clips with sound: both streams are in the file, and the same content gives the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from gen.media.containers import av_module, read_info
from gen.media.muxed import write_sounding_mp4
from gen.media.video import read_video
from gen.modalities.audio import balls, checker


def sound_of(path) -> np.ndarray:
    """Samples of the sound of a file, float32 [n]."""
    with av_module().open(str(path)) as container:
        return np.concatenate([f.to_ndarray()[0] for f in container.decode(audio=0)])


def test_a_file_has_the_frames_and_the_hits_of_its_sound(tmp_path):
    scene = balls.scenes(1, 3, held=True)[0]
    path = tmp_path / "a.mp4"
    write_sounding_mp4(
        path, scene.frames(), balls.FPS, scene.wave(), balls.RATE, {"prompt": "x"}, scale=16
    )
    assert np.abs(read_video(path, (16, 16)).astype(int) - scene.frames()).max() < 12
    assert read_info(path)["prompt"] == "x"
    heard = checker.listen(sound_of(path))
    assert [h.frame for h in heard] == [h.frame for h in scene.hits()]
    again = tmp_path / "b.mp4"
    write_sounding_mp4(
        again, scene.frames(), balls.FPS, scene.wave(), balls.RATE, {"prompt": "x"}, scale=16
    )
    assert path.read_bytes() == again.read_bytes()
    write_sounding_mp4(again, scene.frames(), balls.FPS, 0 * scene.wave(), balls.RATE, scale=16)
    assert checker.listen(sound_of(again)) == []


def test_waves_that_are_none_are_refused(tmp_path):
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    for bad in (np.zeros((2, 2)), np.zeros(0), np.array([np.nan])):
        with pytest.raises(ValueError, match="expected finite numbers"):
            write_sounding_mp4(tmp_path / "a.mp4", frames, 8.0, bad, 16_000)
