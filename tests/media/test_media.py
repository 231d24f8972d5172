"""Sound and video files: what was written comes back, the same input is the same file, and nothing
is ever read in part."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image

from gen.core.errors import GenError
from gen.media import video
from gen.media.audio import open_sound, read_wav, write_wav
from gen.media.containers import read_info
from gen.media.spectrogram import HEIGHT, RANGE, WIDTH, decibels, ramp, spectrogram_png
from gen.media.video import middle_frame, read_video, write_lossless, write_mp4

sf, av = pytest.importorskip("soundfile"), pytest.importorskip("av")
RATE = 16_000
INFO = {
    "prompt": "three \u00e9 seven " * 9000,
    "seed": 7,
    "sampler": '{"name": "sjd"}',
}  # longer than libsndfile keeps


def wave(n: int = 3001, channels: int = 1, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).uniform(-1, 1, (n, channels)).astype(np.float32)
    return w[:, 0] if channels == 1 else w


def squares(frames: int = 16, side: int = 32, seed: int = 0) -> np.ndarray:
    """Coloured squares that move over a plain ground, by whole pixels."""
    rng = np.random.default_rng(seed)
    out = np.zeros((frames, side, side, 3), np.uint8) + rng.integers(20, 90, 3).astype(np.uint8)
    for c in ((230, 40, 40), (40, 200, 60), (50, 80, 240), (250, 220, 30)):
        (x, y), (dx, dy) = rng.integers(0, side, 2), rng.integers(-2, 3, 2)
        for t in range(frames):
            a, b = (x + dx * t) % (side - 6), (y + dy * t) % (side - 6)
            out[t, b : b + 6, a : a + 6] = c
    return out


def refused(read, *words: str) -> None:
    """One line that says all these words."""
    with pytest.raises(GenError) as caught:
        read()
    text = str(caught.value)
    assert "\n" not in text and all(w in text for w in words), text


# --- Sound


@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_comes_back_to_half_a_step_and_then_exactly(tmp_path, channels):
    path = tmp_path / ".tmp-a"  # the name does not decide the format
    write_wav(path, wave(channels=channels), RATE)
    once = read_wav(path, RATE, channels)
    assert once.dtype == np.float32 and np.abs(once - wave(channels=channels)).max() <= 1 / 2**15
    write_wav(path, once, RATE)
    assert np.array_equal(read_wav(path, RATE, channels), once)


def test_what_is_too_loud_is_clipped(tmp_path):
    write_wav(tmp_path / "a.wav", [-3.0, 3.0, 0.5], RATE)
    assert read_wav(tmp_path / "a.wav", RATE).tolist() == [-1, 1 - 2**-15, 0.5]


@pytest.mark.parametrize(
    "bad", [np.zeros(0), np.zeros((2, 2, 2)), np.array([0, np.nan]), np.array([np.inf])]
)
def test_a_wave_that_is_none_is_not_written(tmp_path, bad):
    with pytest.raises(ValueError, match="expected finite numbers") as caught:
        write_wav(tmp_path / "a.wav", bad, RATE)
    assert not isinstance(caught.value, GenError)  # a job fails this item and goes on
    assert not (tmp_path / "a.wav").exists()


def test_a_sound_that_is_not_what_is_needed_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    for package in ("torchaudio", "scipy", "scipy.signal"):  # they would resample
        monkeypatch.setitem(sys.modules, package, None)
    refused(lambda: read_wav(path, RATE), "a.wav does not exist")
    refused(lambda: read_wav(tmp_path, RATE), "is a folder")
    write_wav(path, wave(), 44_100)
    refused(
        lambda: read_wav(path, RATE),
        "44100",
        "expected 16000",
        "ffmpeg",
        "gen-toolkit[audio]",
    )
    write_wav(path, wave(channels=2), RATE)
    refused(lambda: read_wav(path, RATE), "2 channels", "expected 1")
    refused(lambda: read_wav(path, RATE, 3), "2 channels", "expected 3")
    path.write_bytes(b"hello" * 100)
    refused(lambda: read_wav(path, RATE), "cannot be read", "expected a sound file")
    sf.write(path, np.zeros(0), RATE)
    refused(lambda: read_wav(path, RATE), "is empty")
    for value in (np.nan, np.inf):
        sf.write(path, np.array([0, value, 0]), RATE, "FLOAT")
        refused(lambda: read_wav(path, RATE), "NaN or inf")


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("AIFF", "PCM_24"), ("FLAC", "PCM_16")],
)
def test_a_sound_is_whole_or_refused(tmp_path, kind, subtype):
    path = tmp_path / "a"
    sf.write(path, wave(700), RATE, subtype, format=kind)
    data, whole = path.read_bytes(), read_wav(path, RATE)
    assert len(whole) == 700
    for n in {*range(120), *range(120, len(data), 41), *range(len(data) - 20, len(data))}:
        path.write_bytes(data[:n])
        try:
            assert np.array_equal(read_wav(path, RATE), whole), (
                n
            )  # what follows the samples may be missing
        except GenError as error:
            assert "\n" not in str(error)
    path.write_bytes(data[: len(data) // 2])
    refused(
        lambda: read_wav(path, RATE), "a " if kind == "FLAC" else "is cut off: its header promises"
    )


def test_a_sound_of_unknown_length_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.wav"
    write_wav(path, wave(), RATE)
    data = path.read_bytes()
    at = data.index(b"data") + 4
    path.write_bytes(
        data[:4] + b"\xff" * 4 + data[8:at] + b"\xff" * 4 + data[at + 4 :]
    )  # as ffmpeg writes into a pipe
    assert len(read_wav(path, RATE)) == 3001


# --- Video


@pytest.mark.parametrize("seed", range(3))
def test_a_saved_clip_is_close_to_what_was_made(tmp_path, seed):
    frames, path = squares(seed=seed), tmp_path / ".tmp-a"
    write_mp4(path, frames, 8, scale=8)
    assert read_video(path).shape == (16, 256, 256, 3)
    error = np.abs(read_video(path, (32, 32), 8).astype(int) - frames)
    assert error.mean() < 1 and error.max() < 10
    shown = read_video(path)
    assert np.array_equal(middle_frame(path), shown[len(shown) // 2])


@pytest.mark.parametrize("size", [(10, 20), (90, 160), (32, 6)])
def test_any_even_size_of_clip_is_written(tmp_path, size):
    frames = np.full((3, *size, 3), 200, np.uint8)
    frames[:, : size[0] // 2] = 40  # an edge, so that rows in a wrong place would show
    write_mp4(tmp_path / "a.mp4", frames, 8)
    again = read_video(tmp_path / "a.mp4").astype(int)
    assert again.shape == frames.shape and np.abs(again - frames).mean() < 12


def test_a_clip_is_what_browsers_play(tmp_path):
    path = tmp_path / "a.mp4"
    write_mp4(path, squares(), 8, scale=2)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt, stream.average_rate, stream.frames) == (
            "h264",
            "yuv420p",
            8,
            16,
        )
        assert context.colorspace == context.color_range == 1  # else browsers guess the colours
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (16, 32, 32)])
def test_a_lossless_clip_comes_back_exactly(tmp_path, shape):
    frames, path = (
        np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8),
        tmp_path / "a.mkv",
    )
    write_lossless(path, frames, 12.5)
    assert np.array_equal(read_video(path, shape[1:], 12.5), frames)
    assert read_video(path).dtype == np.uint8


def test_frames_that_are_none_are_not_written(tmp_path):
    for bad in (
        np.zeros((4, 8, 8)),
        np.zeros((4, 8, 8), np.uint8),
        np.zeros((0, 8, 8, 3), np.uint8),
    ):
        for write in (write_mp4, write_lossless):
            with pytest.raises(ValueError, match="expected uint8"):
                write(tmp_path / "a", bad, 8)
    with pytest.raises(ValueError, match="expected even sides"):
        write_mp4(tmp_path / "a", np.zeros((4, 7, 8, 3), np.uint8), 8, scale=3)
    assert not (tmp_path / "a").exists()


def test_a_video_that_is_not_what_is_needed_is_refused(tmp_path):
    path = tmp_path / "a.mp4"
    refused(lambda: read_video(path), "a.mp4 does not exist")
    write_mp4(path, squares(side=24), 8, scale=2)
    refused(lambda: read_video(path, (32, 32)), "48x48", "expected 32x32", "ffmpeg")
    refused(lambda: read_video(path, (96, 96)), "48x48", "expected 96x96")
    refused(lambda: read_video(path, (24, 48)), "48x48", "expected 48x24")
    assert np.array_equal(read_video(path, fps=24), read_video(path).repeat(3, 0))
    assert read_video(path, (12, 12), 8.0).shape == (16, 12, 12, 3)
    path.write_bytes(b"hello" * 100)
    refused(lambda: read_video(path), "cannot be read", "expected a whole video")
    refused(lambda: middle_frame(path), "cannot be read")
    Image.new("RGB", (8, 8)).save(path, format="PNG")
    refused(lambda: read_video(path), "is an image")
    write_wav(path, wave(), RATE)
    refused(lambda: read_video(path), "no video stream, only audio")
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        container.start_encoding()
    refused(lambda: read_video(path), "video", "expected")


@pytest.mark.parametrize("write", [partial(write_mp4, scale=2), write_lossless], ids=["mp4", "mkv"])
@pytest.mark.parametrize("seen", [True, False], ids=["sizes", "frames"])
def test_a_video_is_whole_or_refused(tmp_path, monkeypatch, write, seen):
    """``frames``: the decoder notices by itself, where a container says no sizes."""
    path = tmp_path / "a"
    write(path, squares(6), 8, info={"seed": 1})
    data, whole = path.read_bytes(), read_video(path)
    if not seen:
        monkeypatch.setattr(video, "truncation", lambda *_: None)
    for n in {
        *range(0, 64, 3),
        *range(64, len(data), 61 if seen else 331),
        *range(len(data) - 40, len(data), 7),
    }:
        path.write_bytes(data[:n])
        try:
            assert np.array_equal(read_video(path), whole) and not seen, (
                n
            )  # an index after the frames may be missing
        except GenError as error:
            assert "\n" not in str(error)


# --- Both

WRITERS = {
    "wav": lambda p, i: write_wav(p, wave(), RATE, i),
    "mp4": lambda p, i: write_mp4(p, squares(4), 8, i, 2),
    "mkv": lambda p, i: write_lossless(p, squares(4), 8, i),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_says_how_it_was_made_and_is_the_same_every_time(tmp_path, kind, monkeypatch):
    first, again, plain = (tmp_path / f"{n}.{kind}" for n in "abc")
    WRITERS[kind](first, INFO)
    monkeypatch.setattr("time.time", lambda: 2e9)
    WRITERS[kind](again, dict(reversed(INFO.items())))
    WRITERS[kind](plain, None)
    assert first.read_bytes() == again.read_bytes()
    assert read_info(first) == INFO and read_info(plain) == {}


def test_the_note_of_a_stranger_is_kept_as_it_is(tmp_path):
    with sf.SoundFile(tmp_path / "a.wav", "w", RATE, 1) as file:
        file.comment = "by hand"
        file.write(wave())
    assert read_info(tmp_path / "a.wav") == {"comment": "by hand"}
    (tmp_path / "b").write_bytes(b"nothing")
    refused(lambda: read_info(tmp_path / "b"), "cannot be read")
    refused(lambda: read_info(tmp_path / "c"), "does not exist")


@pytest.mark.parametrize(
    ("module", "package", "use"),
    [
        ("soundfile", "soundfile", lambda p: read_wav(p, RATE)),
        ("av", '"gen-toolkit[video]"', read_video),
        ("soundfile", "soundfile", lambda p: write_wav(p, wave(), RATE)),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, package, use):
    monkeypatch.setitem(sys.modules, module, None)
    refused(lambda: use(tmp_path / "a"), f"needs the package {module}", f"pip install {package}")


# --- Spectrograms


def test_a_spectrogram_shows_what_sounds_when():
    t = np.arange(2 * RATE) / RATE

    def tone(hz, on):
        return np.sin(2 * np.pi * hz * t) * on

    levels = decibels(tone(400, t < 1) + 0.1 * tone(3000, t >= 1), RATE)

    def mel(hz):
        return int(HEIGHT * np.log1p(hz / 700) / np.log1p(RATE / 2 / 700))

    early, late = levels[:, WIDTH // 4], levels[:, 3 * WIDTH // 4]
    assert abs(early.argmax() - mel(400)) <= 1 and abs(late.argmax() - mel(3000)) <= 1
    assert early.max() > -2 and -26 < late.max() < -15  # a tenth of the amplitude is 20 dB less
    assert levels.min() == -RANGE


@pytest.mark.parametrize("n", [1, 2, 100, 5000, 200_000])
def test_any_wave_has_a_spectrogram(n):
    for w in (np.zeros(n), wave(n), wave(n, 2)):
        image = spectrogram_png(w, 8000)
        assert image.size == (WIDTH, HEIGHT) and image.mode == "RGB"
    assert np.asarray(spectrogram_png(np.zeros(n), 8000)).max() == ramp()[0].max()
    assert spectrogram_png(wave(n), 8000).tobytes() == spectrogram_png(wave(n), 8000).tobytes()


def test_a_click_is_seen_wherever_it_is_in_a_long_sound():
    for at in (0, 123_457, 999_999):
        clicked = np.zeros(1_000_000)
        clicked[at] = 1
        assert abs(decibels(clicked, RATE).max(0).argmax() - at * WIDTH / len(clicked)) <= 1


def test_the_colours_get_lighter_in_even_steps():
    light = ramp() @ [0.2126, 0.7152, 0.0722]
    assert len(ramp()) == 256 and (np.diff(light) > 0).all()


def test_open_sound_takes_what_it_gets(tmp_path):
    write_wav(tmp_path / "a.wav", wave(channels=2), 11_025)
    found, rate = open_sound(tmp_path / "a.wav")
    assert found.shape == (3001, 2) and rate == 11_025
