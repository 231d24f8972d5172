"""Sounds of a condition as models hear them, and vectors of conditions at positions of a prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gen.core.errors import GenError
from gen.media.given import read_media
from gen.modalities.checkpoints import sounds
from gen.modalities.checkpoints.sounds import mono_wave
from gen.models.adapters.conditioning import Conditions

WAVE = np.linspace(-0.5, 0.5, 64, dtype=np.float32)


def test_a_sound_at_the_rate_of_the_model_is_its_samples(monkeypatch):
    def resample(wave, rate, target):
        raise AssertionError("nothing is resampled")

    monkeypatch.setattr(sounds, "resample", resample)
    for given in ((WAVE, 8000), WAVE):  # an unknown rate is taken to be the model's
        assert np.array_equal(mono_wave(read_media(given, "audio"), 8000), WAVE)
    with pytest.raises(AssertionError):  # control
        mono_wave(read_media((WAVE, 8000), "audio"), 16000)


def test_another_rate_is_resampled_or_refused(monkeypatch):
    sound = read_media((WAVE, 16000), "audio")
    monkeypatch.setattr(sounds, "resample", lambda wave, rate, to: wave[:: rate // to])
    assert np.array_equal(mono_wave(sound, 8000), WAVE[::2])

    def absent(wave, rate, target):
        raise GenError("torchaudio is missing")

    monkeypatch.setattr(sounds, "resample", absent)
    expected = "audio.1 has 16000 samples per second; the model takes 8000. torchaudio is missing"
    with pytest.raises(GenError, match=expected):
        mono_wave(sound, 8000, "audio.1")


def test_several_channels_are_refused():
    sound = read_media((np.stack([WAVE, WAVE], 1), 8000), "audio")
    with pytest.raises(GenError, match="audio has 2 channels; the model takes 1"):
        mono_wave(sound, 8000)


def test_vectors_of_conditions_stand_where_their_ids_do():
    tables = {"a": torch.tensor([[1.0, 1], [2, 2], [3, 3]]), "b": torch.tensor([[5.0, 5]])}
    conditions = Conditions(lambda name: {"rows": tables[name]})
    assert [conditions.number(name) for name in "ab"] == [0, 1]
    ids = torch.tensor([[-1, 2, 0, -7], [10, -1, -1, 1]])
    inputs = torch.full((2, 4, 2), -1.0)
    got = conditions.placed(inputs, ids, 10, "rows")
    assert got[..., 0].tolist() == [[-1, 3, 1, -1], [5, -1, -1, 2]]
    assert bool((inputs == -1).all())  # the inputs are left as they were
    assert conditions.placed(inputs, ids.clamp_max(-1), 10, "rows") is inputs
