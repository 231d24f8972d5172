"""Tiles and bands: real media come back, lossy ones are read as what they were, bad ones are
refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gen.core.errors import GenError
from gen.media.video import read_video, write_mp4
from gen.modalities.audio import balls, checker, prompts
from gen.models.load.locate import ZOO
from gen.recipes.audio.recipe import frontends
from gen.tokenizers.audio.bands import Bands
from gen.tokenizers.video.tiles import Tiles

SIZES = dict(rate=16_000, hop=1000, levels=6, edges=(160, 400, 640, 1280), tones=(320, 512, 800))


@pytest.fixture(scope="module")
def scenes():
    return balls.scenes(40, 5, held=True)


@pytest.fixture(scope="module")
def tiles():
    return Tiles.from_pretrained(ZOO / prompts.TILES_FOLDER)


@pytest.fixture(scope="module")
def bands():
    return Bands.from_pretrained(ZOO / prompts.BANDS_FOLDER)


def test_the_embedded_frontends_are_those_that_the_recipe_makes(tiles, bands):
    made = frontends()
    assert torch.equal(tiles.tiles, made[prompts.TILES_FOLDER].tiles)
    assert torch.equal(bands.fingerprint, made[prompts.BANDS_FOLDER].fingerprint)
    assert tiles.config.codebook_sizes == (len(balls.tiles()),)
    assert bands.config.codebook_sizes == (prompts.LEVELS,) * prompts.STREAMS


# --- tiles


def test_clips_come_back_bit_for_bit(tiles, scenes):
    frames = np.stack([s.frames() for s in scenes])
    codes = tiles.encode(torch.stack([tiles.preprocess(f) for f in frames]))
    assert codes.shape == (len(scenes), 1, *tiles.grid_for((16, 3, 16, 16)))
    assert all(
        np.array_equal(tiles.postprocess(x), f)
        for x, f in zip(tiles.decode(codes), frames, strict=True)
    )


def test_a_lossy_file_is_read_as_the_tiles_that_were_drawn(tiles, scenes, tmp_path):
    for scene in scenes[:4]:
        write_mp4(tmp_path / "clip.mp4", scene.frames(), balls.FPS, scale=16)
        read = read_video(tmp_path / "clip.mp4", (balls.SIZE, balls.SIZE))
        assert prompts.clip_codes(read, tiles) == prompts.clip_codes(scene.frames(), tiles)
    noise = np.random.default_rng(0).integers(0, 255, scene.frames().shape, np.uint8)
    assert prompts.clip_codes(noise, tiles) != prompts.clip_codes(scene.frames(), tiles)


def test_other_frames_codes_and_folders_are_refused(tiles, tmp_path):
    for bad in (np.zeros((16, 12, 16, 3), np.uint8), np.zeros((16, 16, 16, 3)), np.zeros(3)):
        with pytest.raises(GenError, match="expected"):
            tiles.preprocess(bad)
    with pytest.raises(GenError, match="expected"):
        tiles.decode(torch.full((1, 1, 2, 2, 2), len(tiles.tiles)))
    with pytest.raises(GenError, match=r"expected uint8"):
        Tiles(torch.zeros(2, 8, 4, 3, dtype=torch.uint8))
    (tmp_path / "config.json").write_text(json.dumps({"frontend_class": "bands"}))
    with pytest.raises(GenError, match="frontend_class 'tiles'"):
        Tiles.from_pretrained(tmp_path)


# --- bands


def test_the_codes_of_sounds_survive_decoding(bands, scenes):
    x = torch.stack([bands.preprocess(s.wave()) for s in scenes])
    codes = bands.encode(x)
    assert codes.shape == (len(scenes), prompts.STREAMS, prompts.STEPS)
    assert torch.equal(bands.encode(bands.decode(codes)), codes)
    for scene, wave in zip(scenes, bands.decode(codes), strict=True):
        heard = checker.listen(bands.postprocess(wave))
        assert [(h.frame, h.loud) for h in heard] == [(h.frame, h.loud) for h in scene.hits()]


def test_a_sine_is_one_code_in_its_own_band(bands):
    n = torch.arange(4000) / bands.rate
    for band, hertz in enumerate(bands.tones):
        for level in range(1, bands.levels):
            x = 2.0 ** (level - bands.levels + 1) * (2 * torch.pi * hertz * n).sin()
            expected = torch.zeros(len(bands.tones), 4, dtype=torch.long)
            expected[band] = level
            assert torch.equal(bands.encode(x[None, None])[0], expected)
    assert not bands.encode(torch.zeros(1, 1, 4000)).any()


def test_a_steady_code_is_decoded_to_its_sine(bands):
    codes = torch.zeros(1, 3, 4, dtype=torch.long)
    codes[0, 1] = 5
    n = torch.arange(4000) / bands.rate
    sine = (2 * torch.pi * bands.tones[1] * n).sin()
    wave = bands.decode(codes)[0, 0]
    assert torch.allclose(wave[:3800], sine[:3800], atol=1e-3)
    assert wave[-1].abs() < 1e-3  # it fades before the silence behind it


def test_settings_that_make_no_codec_and_other_waves_are_refused(bands, tmp_path):
    for change in (
        {"tones": (320, 512, 801)},
        {"tones": (320, 512, 400)},
        {"edges": (160, 400)},
        {"levels": 1},
    ):
        with pytest.raises(GenError, match="expected"):
            Bands(**{**SIZES, **change})
    for bad in (np.zeros(1001, np.float32), np.zeros((2, 1000), np.float32), np.full(1000, np.nan)):
        with pytest.raises(GenError, match="multiple of 1000"):
            bands.preprocess(bad)
    with pytest.raises(GenError, match="expected"):
        bands.decode(torch.full((1, 3, 2), 6))
    bands.save_pretrained(tmp_path)
    assert torch.equal(Bands.from_pretrained(tmp_path).fingerprint, bands.fingerprint)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "more": 1}))
    with pytest.raises(GenError, match="frontend_class 'bands'"):
        Bands.from_pretrained(tmp_path)
