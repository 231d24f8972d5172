"""Sound files of any rate and sample format are heard as they are by a model of another rate."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.media import resample as resampling
from gen.media.audio import open_sound, read_wav
from gen.media.given import read_media
from gen.media.resample import resample
from gen.modalities.audio import balls
from gen.modalities.audio.prompts import sound_wave
from gen.modalities.checkpoints.sounds import mono_wave

sf = pytest.importorskip("soundfile")
RATES = [8000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000]
PACKAGES = ["scipy", *(["torchaudio"] if find_spec("torchaudio") else [])]


def sine(rate: int, hertz: float = 440, seconds: float = 0.25) -> np.ndarray:
    """A tone of amplitude 0.5, from the closed form of every rate."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch):
    if request.param == "scipy":
        monkeypatch.setitem(sys.modules, "torchaudio", None)
    return request.param


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_in_another_rate_is_the_tone(rate, tmp_path, package):
    sf.write(tmp_path / "a.wav", sine(rate), rate, "FLOAT")
    found = read_wav(tmp_path / "a.wav", 16_000)
    expected = sine(16_000)
    assert found.dtype == np.float32 and abs(len(found) - len(expected)) <= 1
    error = np.abs(found[:4000] - expected[: len(found)])[200:-200].max()
    assert error < 2e-3
    wrong = np.abs(open_sound(tmp_path / "a.wav")[0][:2000, 0] - expected[:2000])
    assert wrong.max() > 0.1  # control: its samples as they are


def test_frequencies_that_the_rate_cannot_hold_are_gone(package):
    high = resample(sine(48_000, 11_000)[:, None], 48_000, 16_000)[100:-100]
    assert np.abs(high).max() < 0.02
    assert np.abs(sine(48_000, 11_000)[::3]).max() > 0.4  # control: without a filter


@pytest.mark.parametrize("rate, target", [(16_000, 24_000), (44_100, 16_000), (7999, 16_000)])
@pytest.mark.parametrize("count, channels", [(1, 1), (999, 2), (1000, 1)])
def test_every_channel_has_the_samples_of_its_length(rate, target, count, channels, package):
    wave = np.random.default_rng(0).normal(size=(count, channels)).astype(np.float32)
    found = resample(wave, rate, target)
    assert found.shape == (-(-count * target // rate), channels) and found.dtype == np.float32
    alone = resample(wave[:, -1:], rate, target)
    assert np.allclose(found[:, -1:], alone, atol=1e-6)


FORMATS = {
    ("WAV", "PCM_U8"): 1 / 128,
    ("WAV", "PCM_16"): 1 / 2**15,
    ("WAV", "PCM_24"): 1 / 2**23,
    ("WAV", "PCM_32"): 1e-7,
    ("WAV", "FLOAT"): 1e-7,
    ("WAV", "DOUBLE"): 1e-7,
    ("WAV", "ULAW"): 0.02,
    ("FLAC", "PCM_S8"): 1 / 128,
    ("FLAC", "PCM_24"): 1 / 2**23,
    ("AIFF", "PCM_16"): 1 / 2**15,
    ("AU", "PCM_16"): 1 / 2**15,
    ("OGG", "VORBIS"): 0.05,
}


@pytest.mark.parametrize("kind, subtype", FORMATS)
def test_samples_of_every_format_have_one_scale(kind, subtype, tmp_path):
    sf.write(tmp_path / "a", sine(16_000), 16_000, subtype, format=kind)
    found = read_wav(tmp_path / "a", 16_000)
    assert np.abs(found - sine(16_000)).max() <= FORMATS[kind, subtype]


def test_without_a_package_both_rates_are_named(tmp_path, monkeypatch):
    for name in ("torchaudio", "scipy", "scipy.signal"):
        monkeypatch.setitem(sys.modules, name, None)
    sf.write(tmp_path / "a.wav", sine(44_100), 44_100)
    with pytest.raises(GenError, match=r"44100 samples per second; expected 16000.*gen-toolkit"):
        read_wav(tmp_path / "a.wav", 16_000)
    with pytest.raises(GenError, match="44100 samples per second; the model takes 16000"):
        mono_wave(read_media(tmp_path / "a.wav", "audio"), 16_000)
    assert len(read_wav(tmp_path / "a.wav", 44_100)) == 11_025


def test_torchaudio_comes_first_where_it_works(monkeypatch):
    class Functional:
        @staticmethod
        def resample(signal, rate, target):
            return signal[:, :: rate // target] + 1

    monkeypatch.setattr(resampling, "functional", Functional)
    wave = np.zeros((8, 2), np.float32)
    assert np.array_equal(resample(wave, 16_000, 8000), np.ones((4, 2)))


def test_every_door_resamples_alike(tmp_path):
    hit = balls.render([(3, "high", True)])
    sf.write(tmp_path / "a.wav", resample(hit[:, None], balls.RATE, 48_000), 48_000, "FLOAT")
    given = read_media(tmp_path / "a.wav", "audio")
    for found in (
        read_wav(tmp_path / "a.wav", balls.RATE),
        mono_wave(given, balls.RATE),
        sound_wave(given),
        mono_wave(read_media((tmp_path / "a.wav").read_bytes(), "audio"), balls.RATE),
    ):
        assert np.corrcoef(found[: len(hit)], hit[: len(found)])[0, 1] > 0.98
