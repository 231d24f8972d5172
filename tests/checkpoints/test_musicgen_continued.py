"""MusicGen after a sound that it continues, against their own processor and ``generate``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calls import only
from published import save_quietly
from tiny_musicgen import RATE, Q, T, tiny, tokenizer

import gen
from gen.core.errors import GenError
from gen.models.load.locate import quiet

FRAME = 40
GREEDY = {"temperature": 0.0, "guidance_scale": 1.0}
SAMPLERS = ("autoregressive", "speculative_jacobi")
TEXTS = ["a slow song", "fast drums and loud guitar in the rain", "piano", "soft bass with drums"]


def wave(samples: int, seed: int) -> np.ndarray:
    return (0.3 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


# unequal sounds: none, less than the delay, several frames, no whole number of frames
SOUNDS = [None, wave(FRAME, 1), wave(6 * FRAME, 2), wave(9 * FRAME + 13, 3)]
ROWS = list(zip(TEXTS, SOUNDS, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("musicgen")
    save_quietly(tiny(), path)
    tokenizer(path)
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("speech", model=folder, frames=T, dtype="float64")


@pytest.fixture(scope="module")
def model(folder):
    from transformers import MusicgenForConditionalGeneration

    with quiet():
        return MusicgenForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def processor(folder):
    """The two parts of their processor, whose class takes T5's own tokenizer alone."""
    from transformers import AutoTokenizer, EncodecFeatureExtractor

    own = EncodecFeatureExtractor(1, RATE, padding_value=0.0, padding_side="left")
    return own, AutoTokenizer.from_pretrained(folder)


def theirs(model, processor, rows, scale=1.0) -> torch.Tensor:
    """New codes [B, Q, T] of their own loop, taken where it hands all codes to the codec."""
    extractor, words = processor
    texts, sounds = [t for t, _ in rows], [s for _, s in rows if s is not None]
    inputs = dict(words(texts, padding=True, return_tensors="pt"))
    if sounds:
        heard = extractor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt")
        inputs["input_values"] = heard["input_values"].double()
        inputs["padding_mask"] = heard["padding_mask"]
    frames = -(-max((len(s) for s in sounds), default=0) // FRAME)
    found, codec = [], model.audio_encoder
    real = codec.decode
    codec.decode = lambda codes, **rest: found.append(codes[0].clone()) or real(codes, **rest)
    try:
        with quiet():
            model.generate(
                **inputs, do_sample=False, guidance_scale=scale, max_length=frames + T + Q
            )
    finally:
        del codec.decode
    return found[0][..., frames:]


def condition(text: str, sound: np.ndarray | None) -> dict:
    return {"text": text} | ({} if sound is None else {"audio": (sound, RATE)})


def ours(pipe, rows, sampler, **sampling) -> torch.Tensor:
    out = pipe([condition(*row) for row in rows], sampler=sampler, **only(**(sampling or GREEDY)))
    return pipe.modality.to_codes(out.tokens, None)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_codes_after_a_sound_are_those_of_generate(scale, pipe, model, processor):
    want = [theirs(model, processor, [row], scale)[0] for row in ROWS]
    assert all(x.shape == (Q, T) for x in want)
    sampling = {"temperature": 0.0, "guidance_scale": scale}
    for sampler in SAMPLERS:
        assert torch.equal(ours(pipe, ROWS, sampler, **sampling), torch.stack(want))
        for row, one in enumerate(ROWS):
            assert torch.equal(ours(pipe, [one], sampler, **sampling)[0], want[row])
    silent = ours(pipe, [(text, None) for text in TEXTS], "autoregressive", **sampling)
    changed = [not torch.equal(a, b) for a, b in zip(silent, want, strict=True)]
    assert changed == [False, True, True, True]  # control: the sounds are heard
    swapped = [ROWS[0], ROWS[1], (TEXTS[2], SOUNDS[3]), (TEXTS[3], SOUNDS[2])]
    others = ours(pipe, swapped, "autoregressive", **sampling)
    changed = [not torch.equal(a, b) for a, b in zip(others, want, strict=True)]
    assert changed == [False, False, True, True]  # control: sounds of two rows are exchanged


def test_a_batch_of_equal_sounds_is_theirs_and_padded_ones_hear_silence_there(
    pipe, model, processor
):
    equal = [(TEXTS[0], SOUNDS[2]), (TEXTS[1], wave(6 * FRAME, 7))]
    want = theirs(model, processor, equal, 3.0)
    sampling = {"temperature": 0.0, "guidance_scale": 3.0}
    assert torch.equal(ours(pipe, equal, "speculative_jacobi", **sampling), want)
    short, long = (TEXTS[0], SOUNDS[1]), (TEXTS[1], SOUNDS[2])
    padded = theirs(model, processor, [short, long])
    silence = np.concatenate([np.zeros(5 * FRAME, np.float32), SOUNDS[1]])
    assert torch.equal(ours(pipe, [(TEXTS[0], silence), long], SAMPLERS[0]), padded)
    alone = theirs(model, processor, [short])[0]
    assert not torch.equal(padded[0], alone)  # control: the reason not to pad
    assert torch.equal(ours(pipe, [short, long], SAMPLERS[0])[0], alone)


def test_draws_after_a_sound_are_the_same_for_both_samplers(pipe):
    sampling = {"temperature": 1.0, "guidance_scale": 2.0}
    first, second = (ours(pipe, ROWS, s, **sampling) for s in SAMPLERS)
    assert torch.equal(first, second)
    assert not torch.equal(first, ours(pipe, ROWS, SAMPLERS[0], temperature=1.0))


def test_media_begin_with_the_sound_that_is_continued(pipe, model):
    rows = [condition(*row) for row in ROWS]
    out = pipe(rows, sampler="autoregressive", seed=2)
    codes = pipe.modality.to_codes(out.tokens, None)
    for (_, sound), media, row in zip(ROWS, out.media, codes, strict=True):
        frames = 0 if sound is None else -(-len(sound) // FRAME)
        assert media.shape == ((frames + T) * FRAME,) and media.dtype == np.float32
        if sound is not None:
            assert np.array_equal(media[: len(sound)], sound)
            assert not media[len(sound) : frames * FRAME].any()
        with torch.no_grad():
            music = model.audio_encoder.decode(row[None, None], [None]).audio_values[0, 0]
        rest = torch.from_numpy(media[frames * FRAME :]).double()
        assert torch.allclose(rest, music.clamp(-1, 1), atol=1e-6)


def test_sounds_that_cannot_be_continued_are_refused(pipe, tmp_path):
    image, unreadable = tmp_path / "a.png", tmp_path / "b.wav"
    image.write_bytes(b"x")
    unreadable.write_bytes(b"x" * 64)
    sound = (SOUNDS[2], RATE)
    for parts, message in (
        ({"text": "piano", "audio": image}, "a.png', an image; expected a sound"),
        ({"text": "piano", "audio": unreadable}, "b.wav cannot be read"),
        ({"text": "piano", "audio": [sound, sound]}, "at most 1 audio; got 2"),
        ({"text": "piano", "audio": (wave(60 * FRAME, 1), RATE)}, "60 frames; expected at most"),
        ({"text": "piano", "audio": (np.zeros((80, 2), np.float32), RATE)}, "2 channels"),
        ({"audio": sound}, "empty"),
        ({"text": "piano", "images": [np.zeros((4, 4, 3), np.uint8)]}, "got images"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(parts, sampler="autoregressive")
