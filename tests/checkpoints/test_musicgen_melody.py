"""MusicGen Melody through the causal protocol against its own class, feature extractor and
``generate``."""

from __future__ import annotations

import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from calls import only
from tiny_musicgen import RATE, Q, T
from tiny_musicgen_melody import CHROMA, PROCESSOR, written

import gen
from gen.core.errors import GenError
from gen.models.load.locate import quiet

SAMPLERS = ("autoregressive", "speculative_jacobi")
TEXTS = ["a slow song", "fast drums and loud guitar in the rain", "piano", "soft bass with drums"]


def tune(samples: int, seed: int) -> np.ndarray:
    """Notes of random pitch, some noise among them, float32 [n]."""
    rng = np.random.default_rng(seed)
    pitches = 220 * 2 ** (rng.integers(0, 24, 1 + samples // 900) / 12)
    phase = np.cumsum(2 * np.pi * np.repeat(pitches, 900)[:samples] / RATE)
    return (0.5 * np.sin(phase) + 0.01 * rng.standard_normal(samples)).astype(np.float32)


# unequal sounds: none, less than a window, less than the melody of the model, more than it
SOUNDS = [None, tune(301, 1), tune(500, 2), tune(6000, 3)]
ROWS = list(zip(TEXTS, SOUNDS, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("melody"))


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("speech", model=folder, frames=T, dtype="float64")


@pytest.fixture(scope="module")
def model(folder):
    from transformers import MusicgenMelodyForConditionalGeneration

    with quiet():
        return MusicgenMelodyForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float64
        ).eval()


class Spectrogram:
    """The spectrogram of torchaudio, which need not be there, by transformers' numpy."""

    def __init__(self, n_fft, win_length, hop_length, **rest):
        assert rest == dict(power=2, center=True, pad=0, normalized=True)
        self.n_fft, self.hop = n_fft, hop_length

    def __call__(self, waves):
        from transformers.audio_utils import spectrogram, window_function

        window = window_function(self.n_fft, "hann")
        found = [
            spectrogram(w.numpy(), window, self.n_fft, self.hop, power=2.0) / (window**2).sum()
            for w in waves
        ]
        return torch.from_numpy(np.stack(found)).float()


@pytest.fixture(scope="module")
def extractor():
    """Their class over a stand-in for torchaudio, without which transformers hides it."""
    models = Path(transformers.__file__).parent / "models" / "musicgen_melody"
    name = "feature_extraction_musicgen_melody"
    spec = spec_from_file_location(
        f"transformers.models.musicgen_melody.{name}", models / f"{name}.py"
    )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torchaudio = SimpleNamespace(transforms=SimpleNamespace(Spectrogram=Spectrogram))
    return module.MusicgenMelodyFeatureExtractor(**PROCESSOR)


def theirs(model, extractor, checkpoint, rows, scale) -> torch.Tensor:
    """Codes [B, Q, T] of their own loop, taken where it hands them to the codec."""
    inputs = dict(checkpoint.tokenizer([t for t, _ in rows], padding=True, return_tensors="pt"))
    sounds = [s for _, s in rows if s is not None]
    if sounds:
        heard = extractor(sounds, sampling_rate=RATE, return_tensors="pt")
        inputs["input_features"] = heard["input_features"].double()
    found, codec = [], model.audio_encoder
    real = codec.decode
    codec.decode = lambda codes, **rest: found.append(codes[0].clone()) or real(codes, **rest)
    try:
        with quiet():
            model.generate(**inputs, do_sample=False, guidance_scale=scale, max_length=T + Q)
    finally:
        del codec.decode
    return found[0]


def ours(pipe, rows, sampler, **sampling) -> torch.Tensor:
    prompts = [{"text": t} | ({} if s is None else {"audio": (s, RATE)}) for t, s in rows]
    out = pipe(prompts, sampler=sampler, **only(**sampling))
    return pipe.modality.to_codes(out.tokens, None)


def test_melodies_are_those_of_the_feature_extractor(pipe, extractor):
    chroma = pipe.modality.checkpoint.chroma
    for sound in [*SOUNDS[1:], tune(8000, 5), np.zeros(900, np.float32)]:
        want = extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        assert torch.equal(chroma.melody(sound).float(), want)
    assert len(chroma.melody(SOUNDS[3]).argmax(1).unique()) > 3
    # control: a semitone higher is another pitch class
    steps = np.arange(4000) / RATE
    a, b = (np.sin(2 * np.pi * f * steps).astype(np.float32) for f in (440.0, 466.16))
    classes = [int(chroma.melody(x).argmax(1)[5]) for x in (a, b)]
    assert (classes[1] - classes[0]) % 12 == 1


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_codes_of_a_melody_are_those_of_generate(scale, pipe, model, extractor):
    checkpoint, sampling = pipe.modality.checkpoint, dict(temperature=0.0, guidance_scale=scale)
    want = [theirs(model, extractor, checkpoint, [row], scale)[0] for row in ROWS]
    assert len({tuple(x.flatten().tolist()) for x in want}) == len(ROWS)
    assert len(torch.stack(want).unique()) > 8
    for sampler in SAMPLERS:
        assert torch.equal(ours(pipe, ROWS, sampler, **sampling), torch.stack(want))
        for row, one in enumerate(ROWS):
            assert torch.equal(ours(pipe, [one], sampler, **sampling)[0], want[row])
    swapped = [*ROWS[:2], (TEXTS[2], SOUNDS[3]), (TEXTS[3], SOUNDS[2])]
    others = ours(pipe, swapped, "autoregressive", **sampling)
    changed = [not torch.equal(a, b) for a, b in zip(others, want, strict=True)]
    assert changed == [False, False, True, True]  # control: melodies of two rows are exchanged


def test_a_batch_of_texts_of_one_length_is_theirs(pipe, model, extractor):
    rows = [("slow song", tune(3000, 6)), ("piano song", tune(3000, 7))]
    want = theirs(model, extractor, pipe.modality.checkpoint, rows, 3.0)
    got = ours(pipe, rows, "speculative_jacobi", temperature=0.0, guidance_scale=3.0)
    assert torch.equal(got, want) and not torch.equal(want[0], want[1])


def test_draws_of_a_melody_are_the_same_for_both_samplers(pipe):
    sampling = {"temperature": 1.0, "guidance_scale": 2.0}
    first, second = (ours(pipe, ROWS, s, **sampling) for s in SAMPLERS)
    assert torch.equal(first, second)
    assert not torch.equal(first, ours(pipe, ROWS, SAMPLERS[0], temperature=1.0))


def test_media_are_the_music_alone(pipe):
    out = pipe({"text": "piano", "audio": (SOUNDS[2], RATE)}, sampler="autoregressive")
    assert out.media[0].shape == (T * 40,)


def test_what_has_no_melody_is_refused(pipe, folder, tmp_path):
    image = tmp_path / "a.png"
    image.write_bytes(b"x")
    sound = (SOUNDS[2], RATE)
    for parts, message in (
        ({"text": "piano", "audio": image}, "a.png', an image; expected a sound"),
        ({"text": "piano", "audio": [sound, sound]}, "at most 1 audio; got 2"),
        ({"text": "piano", "audio": (tune(RATE + 1, 1), RATE)}, "lasts 1.0 seconds; expected"),
        ({"text": "piano", "audio": (np.zeros((80, 2), np.float32), RATE)}, "2 channels"),
        ({"text": "piano " * 60}, f"take {CHROMA + 61} positions; expected at most"),
        ({"audio": sound}, "empty"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(parts, sampler="autoregressive")
    copied = shutil.copytree(folder, tmp_path / "f")
    for changed, message in (
        ({"num_chroma": 24}, "num_chroma in .* is 24; expected 12"),
        ({"n_fft": None}, "n_fft in preprocessor_config.json of .* is None"),
    ):
        (copied / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | changed))
        with pytest.raises(GenError, match=message):
            gen.load("speech", model=copied, frames=T)
