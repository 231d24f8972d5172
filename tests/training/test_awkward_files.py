"""Awkward files are trained on as what they show or sound like, or named with the reason.

The pictures, sounds and clips are closed forms (``awkward``), so that what each file should become
is computed, not read.
"""

from __future__ import annotations

from pathlib import Path

import awkward
import numpy as np
import pytest
import torch

from gen.jobs.progress.report import Silent
from gen.training.encode import EncodeOptions, Encoding, encode_folder
from gen.training.frontends import load_encoder, size_of
from gen.training.shards import read_folder
from gen.training.sources import find_sources

# mean distance of a read medium from the closed form: of 255 levels, and of amplitudes in [-1, 1]
NEAR = {"image": 3.0, "video": 6.0, "speech": 0.02}
PLANS = {
    "image": (
        "22 images: ",
        "7 turned by their orientation",
        "2 animated, of which the first frame is taken",
        "1 CMYK",
        "cannot be read: 3: cut.jpg",
        "to 64x64: ",
        "cut at their edges",
        ", 10 enlarged",
    ),
    "speech": (
        "21 sounds: 0.01 to 6.5 s",
        "Hz; ",
        "cannot be read: 1: none.flac",
        "resampled to 16000 Hz",
        "5 of several channels mixed",
        "1 longer than 2.4 s, cut into 3 windows",
        "which end with silence",
    ),
    "video": (
        "11 clips: ",
        "frames per second",
        "cannot be read: 2: ",
        "resampled to 8 frames per second",
        "1 longer than 2 s, cut into 3 windows",
        "which end with their last frame",
    ),
}
OTHER = {"image": 15.0, "video": 15.0, "speech": 0.1}


class Notes(Silent):
    """Progress that keeps what is said."""

    def __init__(self):
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def check(name: str, folder: Path, made: awkward.Made, out: Path) -> dict[str, np.ndarray]:
    """Encode a folder and compare what was read, and its tokens. Returns what was read."""
    expected, refused = made
    assert len(expected) + len(refused) >= 13
    options, notes = EncodeOptions(resize="crop", skip_unreadable=True), Notes()
    manifest = encode_folder(name, folder, out, options, notes)
    assert notes.said[0].startswith(PLANS[name][0]), notes.said
    for part in PLANS[name][1:]:
        assert any(part in line for line in notes.said), (part, notes.said)
    assert not any("\n" in line for line in notes.said)
    encoder = load_encoder(name)
    work = Encoding(encoder, size_of(encoder, None, "crop"))
    _, shards = read_folder(out)
    tokens = {n: t for s in shards for n, t in zip(s.sources, s.tokens, strict=True)}
    assert set(manifest["skipped"]) == set(refused)
    for file, reason in refused.items():
        assert reason in manifest["skipped"][file], manifest["skipped"][file]
    found, seen = {}, set()
    for source in find_sources(folder, name).sources:
        if source.name in refused:
            continue
        parts = work.read(source)
        assert len(parts) == len(expected[source.name]), source.name
        for (part, _, signal), wanted in zip(parts, expected[source.name], strict=True):
            media = np.asarray(encoder.frontend.postprocess(signal), float)
            distance = np.abs(media - wanted).mean()
            assert media.shape == wanted.shape and distance < NEAR[name], (part, distance)
            if len(seen) % 4 == 0:  # encoding twice takes its time
                assert torch.equal(encoder.sequences([signal])[0], tokens[part]), part
            seen.add(part)
            found[part] = media
    assert seen == set(tokens)
    return found


@pytest.mark.parametrize("large", [(800, 600), pytest.param((8000, 6000), marks=pytest.mark.slow)])
def test_every_picture_is_what_it_shows_or_named(large, tmp_path):
    made = awkward.images(tmp_path / "media", large)
    found = check("image", tmp_path / "media", made, tmp_path / "D")
    # controls: a picture on its side, or of another part, or squashed, is another one
    wide, square = found["wide.jpg"], found["turned-6.png"]
    assert np.abs(square - np.rot90(square)).mean() > OTHER["image"]
    assert np.abs(wide - awkward.cropped(64, 64)).mean() > OTHER["image"]


def test_every_sound_is_what_it_sounds_like_or_named(tmp_path):
    made = awkward.sounds(tmp_path / "media")
    found = check("speech", tmp_path / "media", made, tmp_path / "D")
    # controls: samples at another rate, and another window
    assert np.abs(found["long.wav#1"] - found["long.wav#0"]).mean() > OTHER["speech"]
    slow = awkward.wave(8000, 1.5)
    assert np.abs(found["8000.wav"][: len(slow)] - slow).mean() > OTHER["speech"]


@pytest.mark.slow
def test_every_clip_is_what_it_shows_or_named(tmp_path):
    made = awkward.clips(tmp_path / "media")
    found = check("video", tmp_path / "media", made, tmp_path / "D")
    # controls: frames one after the other whatever their times, and a clip on its side
    plain = np.stack([awkward.cropped(48, 36, 32, i / 24) for i in range(16)])
    assert np.abs(found["24.mkv"] - plain)[-4:].mean() > OTHER["video"]
    assert np.abs(found["turned.mp4"] - np.rot90(found["turned.mp4"], axes=(1, 2))).mean() > 20
