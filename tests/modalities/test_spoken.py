"""The spoken language, the synthesiser, and the listener that judges every clip gen reports a
quality for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gen.modalities.speech import synth as spoken
from gen.modalities.speech.checker import Transcript, check, check_many, hear, judge
from gen.modalities.speech.synth import FRAME, RATE, SAMPLES, Utterance, parse, speak

TIME = np.arange(SAMPLES) / RATE


def spoken_clips(utterances: list[Utterance], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([speak(u, rng) for u in utterances])


@pytest.fixture(scope="module")
def data() -> tuple[list[Utterance], np.ndarray]:
    """Half of them held out; a third say neither voice nor speed, and so are drawn one."""
    utterances = spoken.utterances(75, 41, held=False) + spoken.utterances(75, 42, held=True)
    utterances = [Utterance(u.words) if k % 3 == 0 else u for k, u in enumerate(utterances)]
    return utterances, spoken_clips(utterances, 43)


@pytest.fixture(scope="module")
def heard(data) -> list[Transcript]:
    return [hear(w) for w in data[1]]


# --- The language


def test_every_utterance_reads_back_as_itself():
    rng = np.random.default_rng(0)
    for _ in range(300):
        utterance = spoken.random_utterance(rng)
        partial = replace(utterance, **{k: None for k in ("voice", "speed") if rng.random() < 0.5})
        assert parse(str(utterance)) == utterance
        assert parse(str(partial)) == partial
    assert str(parse("go, slow")) == "go, slow"
    assert str(Utterance(("three", "seven"), "high", "fast")) == "three seven, high voice, fast"


def test_equivalent_spellings_mean_the_same_utterance():
    expected = parse("three seven, high voice, fast")
    for text in (
        "3 7, high voice, fast",
        "Three  SEVEN high fast.",
        "37; fast speed, high voice",
        " three,7 ,fast,high voice ",
    ):
        assert parse(text) == expected


def test_slots_hold_each_stated_word_and_mark_the_rest():
    def words(u):
        return [spoken.TABLE[s] for s in u.slots()]

    assert words(parse("3 7, high voice")) == [
        "three",
        "seven",
        "<none>",
        "<none>",
        "high",
        "<any>",
    ]
    assert words(parse("go, slow")) == ["go", "<none>", "<none>", "<none>", "<any>", "slow"]
    every = [spoken.random_utterance(np.random.default_rng(i)).slots() for i in range(50)]
    assert {len(s) for s in every} == {spoken.SLOTS}
    assert len({tuple(s) for s in every}) > 45


def test_a_prompt_joins_every_value_with_its_slot():
    utterance = parse("go go stop, low voice")
    assert [(spoken.TABLE[p // spoken.SLOTS], p % spoken.SLOTS) for p in utterance.pairs()] == [
        ("go", 0),
        ("go", 1),
        ("stop", 2),
        ("<none>", 3),
        ("low", 4),
        ("<any>", 5),
    ]
    grid = np.arange(len(spoken.TABLE))[:, None].repeat(spoken.SLOTS, 1)
    assert sorted(spoken.pairs(grid).ravel()) == list(
        range(spoken.PAIRS)
    )  # one symbol each, none unused
    assert spoken.pairs(np.full((1, spoken.SLOTS), spoken.ANY)).tolist() == [
        list(range(spoken.SLOTS))
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("three sevn", ("'sevn'", "'seven'", "Known: zero, one")),
        ("three, loud voice", ("'loud'", "outside the vocabulary")),
        ("voice three", ("'voice'", "outside the vocabulary")),
        ("one two three four five", ("5 words", "one to four")),
        ("high voice", ("0 words", "one to four")),
        ("go, high voice, low voice", ("voice twice", "'high'", "'low'")),
        ("  ", ("empty", "three seven, high voice, fast")),
    ],
)
def test_a_bad_prompt_names_what_is_wrong_and_what_was_expected(text, names):
    with pytest.raises(ValueError) as error:
        parse(text)
    for name in names:
        assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_the_held_out_tenth_is_disjoint_and_about_a_tenth():
    rng = np.random.default_rng(5)
    assert (
        0.06 < np.mean([spoken.held_out(spoken.random_utterance(rng)) for _ in range(3000)]) < 0.14
    )
    seen, unseen = (set(map(str, spoken.utterances(400, 6, held=h))) for h in (False, True))
    assert seen.isdisjoint(unseen)
    assert all(spoken.held_out(parse(u)) for u in unseen)


# --- The synthesiser


def test_the_same_seed_speaks_the_same_clip_and_another_seed_another_one():
    utterance = parse("three seven")
    first, again, other = (speak(utterance, np.random.default_rng(s)) for s in (1, 1, 2))
    assert first.shape == (SAMPLES,) and first.dtype == np.float32
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_clips_fill_their_range_and_begin_and_end_in_exact_silence(data):
    peaks = np.abs(data[1]).max(1)
    assert np.allclose(peaks, spoken.PEAK, atol=1e-6)
    assert not data[1][:, : int(0.035 * RATE)].any()
    assert not data[1][:, -300:].any()


def test_four_slow_words_always_fit():
    longest = max(spoken.WORDS, key=spoken.length)
    slowest = spoken.STRETCH["slow"] * (1 + spoken.STRETCH_JITTER)
    gaps = [spoken.LEAD[1], *[spoken.GAP[1] * spoken.STRETCH["slow"]] * 3]
    wave = spoken.synthesise([longest] * 4, [4] * 4, 1.0, slowest, gaps, np.random.default_rng(0))
    assert not wave[-200:].any()
    with pytest.raises(ValueError, match="a clip has"):
        spoken.synthesise(
            [longest] * 5, [4] * 5, 1.0, slowest, [*gaps, 0.1], np.random.default_rng(0)
        )
    assert all(0.30 <= spoken.length(w) <= 0.42 for w in spoken.WORDS)


@pytest.mark.parametrize("voice", spoken.VOICES)
def test_a_steady_vowel_repeats_in_every_frame(voice):
    for word in ("off", "on", "up", "back"):
        frames = speak(parse(f"{word}, {voice} voice, slow"), np.random.default_rng(0)).reshape(
            -1, FRAME
        )
        change = np.linalg.norm(np.diff(frames, axis=0), axis=1) / (
            np.linalg.norm(frames[1:], axis=1) + 1e-3
        )
        assert change.min() < 0.02, (word, change.min())


# --- The listener


def test_spoken_clips_fulfil_their_utterances(data, heard):
    passed = np.mean([judge(h, u).passed for h, u in zip(heard, data[0], strict=True)])
    print(f"{passed:.4f} of {len(heard)} spoken clips fulfil their utterances")
    assert passed >= 0.99


def test_spoken_clips_do_not_fulfil_other_utterances(data, heard):
    verdicts = [judge(h, u) for h, u in zip(heard, data[0][1:] + data[0][:1], strict=True)]
    assert np.mean([v.passed for v in verdicts]) < 0.02
    assert all(v.valid for v in verdicts)  # valid judges the clip alone


def test_every_word_is_told_from_every_other():
    waves = spoken_clips([Utterance((w,)) for w in spoken.WORDS], 3)
    assert [hear(w).words for w in waves] == [(w,) for w in spoken.WORDS]


def test_changing_any_one_stated_attribute_turns_the_verdict():
    utterance = parse("nine no on, middle voice, normal")
    wave = spoken_clips([utterance], 4)[0]

    def spliced(k, w):
        return (*utterance.words[:k], w, *utterance.words[k + 1 :])

    changed = [
        replace(utterance, words=spliced(k, w))
        for k in range(3)
        for w in spoken.WORDS
        if w != utterance.words[k]
    ]
    changed += [
        replace(utterance, words=w)
        for w in (utterance.words[:2], utterance.words[1:], (*utterance.words, "on"))
    ]
    changed += [replace(utterance, voice=v) for v in ("low", "high")] + [
        replace(utterance, speed=s) for s in ("slow", "fast")
    ]
    assert check(wave, utterance).passed
    assert len(changed) == 3 * 21 + 3 + 4
    heard = hear(wave)
    assert not any(judge(heard, u).passed for u in changed)


def test_a_word_replaced_in_the_clip_turns_the_verdict():
    rng = np.random.default_rng(6)
    for utterance in spoken.utterances(20, 7, held=True):
        k = int(rng.integers(len(utterance.words)))
        other = rng.choice([w for w in spoken.WORDS if w != utterance.words[k]])
        wrong = replace(
            utterance, words=(*utterance.words[:k], str(other), *utterance.words[k + 1 :])
        )
        assert not check(speak(wrong, rng), utterance).passed


def test_a_clip_played_backwards_is_not_what_it_says(data):
    utterances, waves = (d[:80] for d in data)
    passed = [v.passed for v in check_many(waves[:, ::-1], utterances)]
    mirrored = [
        set(u.words) <= {"one", "up", "back"} for u in utterances
    ]  # w-uh-n is nearly n-uh-w, and so with these
    assert not any(f for f, m in zip(passed, mirrored, strict=True) if not m)
    assert np.mean(passed) < 0.03


def test_what_is_no_speech_is_not_valid(data):
    rng = np.random.default_rng(8)
    bursts = (TIME % 0.5) < 0.33
    noise = rng.standard_normal(SAMPLES)
    sounds = {"silence": 0 * TIME, "noise": 0.2 * noise, "bursts of noise": 0.2 * noise * bursts}
    sounds["brown noise"] = np.cumsum(noise) / np.abs(np.cumsum(noise)).max()
    sounds["clicks"] = 0.5 * (np.arange(SAMPLES) % 107 == 0) * bursts
    for hz in (150, 220, 440, 1000, 3000):
        sounds |= {
            f"{hz} Hz": 0.5 * np.sin(2 * np.pi * hz * TIME),
            f"{hz} Hz beeps": 0.5 * np.sin(2 * np.pi * hz * TIME) * bursts,
        }
    sounds["not a number"] = np.full(SAMPLES, np.nan)
    sounds["shuffled frames"] = rng.permutation(data[1][0].reshape(-1, FRAME // 4)).ravel()
    for name, sound in sounds.items():
        verdict = check(sound, "two")
        assert not verdict.valid and not verdict.passed, (name, verdict.detail)


def lowpass(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    spectrum = np.fft.rfft(wave)
    return np.fft.irfft(
        spectrum / np.sqrt(1 + (np.linspace(0, RATE / 2, len(spectrum)) / 4500) ** 8)
    )


def noise(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """25 dB below the clip."""
    return wave + rng.standard_normal(SAMPLES) * wave.std() * 10 ** (-25 / 20)


def mulaw(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Eight bits per sample, and so no exact silence."""
    level = np.floor(np.sign(wave) * np.log1p(255 * np.abs(wave)) / np.log(256) * 127.5) + 0.5
    return np.sign(level) * (256 ** (np.abs(level) / 127.5) - 1) / 255


def phases(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Phases thrown away and guessed from the magnitudes by a few rounds of Griffin and Lim."""
    window, starts = np.hanning(513)[:-1], range(0, SAMPLES + 513, 128)

    def analyse(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, 512)
        return np.fft.rfft(np.stack([padded[s : s + 512] for s in starts]) * window)

    def synthesise(spectra: np.ndarray) -> np.ndarray:
        out = np.zeros(SAMPLES + 1024)
        for s, piece in zip(starts, np.fft.irfft(spectra) * window / 1.5, strict=True):
            out[s : s + 512] += piece
        return out[512:-512]

    size = np.abs(analyse(wave))
    guess = size * np.exp(2j * np.pi * rng.random(size.shape))
    for _ in range(10):
        heard = analyse(synthesise(guess))
        guess = size * heard / (np.abs(heard) + 1e-9)
    return synthesise(guess)


def gain(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return wave * rng.uniform(0.3, 1.0)


@pytest.mark.parametrize(
    "distort",
    [lowpass, noise, *(pytest.param(d, marks=pytest.mark.slow) for d in (mulaw, phases, gain))],
)
def test_what_a_codec_may_do_does_not_turn_the_verdict(data, distort: Callable):
    rng = np.random.default_rng(9)
    utterances, waves = (d[50:95] for d in data)
    verdicts = check_many([distort(w, rng) for w in waves], utterances)
    passed = np.mean([v.passed for v in verdicts])
    print(f"{passed:.4f} fulfil after {distort.__name__}")
    assert passed >= 0.95


def test_tensors_and_texts_are_welcome_and_wrong_sizes_are_not(data):
    import torch

    utterances, waves = data
    assert check(torch.from_numpy(waves[0])[None], str(utterances[0])) == check(
        waves[0], utterances[0]
    )
    with pytest.raises(ValueError, match=r"expected float \[n\], 0 < n <= 38400"):
        check(np.zeros(SAMPLES + 1, np.float32), "two")
    with pytest.raises(ValueError, match="one utterance per clip"):
        check_many(waves[:2], utterances[:1])
