"""Translations of speech: the pronunciations, the tokens, the checker, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import torch

import gen
from gen.contracts.condition import Condition
from gen.contracts.protocol import protocols_of
from gen.core.errors import GenError
from gen.modalities.small_language import held_out
from gen.modalities.speech import synth
from gen.modalities.speech import translation as spoken
from gen.modalities.speech.modality import TRANSLATION_TOKENS, SpeechModality
from gen.modalities.speech.phones import SpokenPhones, TranslatedSpeech
from gen.modalities.text import translation as words
from gen.models.load.locate import ZOO

SOURCE = synth.Utterance(("seven", "seven", "two"), "low", "fast")
PLAIN = {"guidance_scale": 1.0, "top_k": 0}


def sound(seed: int = 0, source: synth.Utterance = SOURCE) -> np.ndarray:
    return synth.speak(source, np.random.default_rng(seed))


def parsed(**parts):
    return SpeechModality().parse(Condition.of(parts))


def test_every_word_has_up_to_seven_phonemes_and_a_third_of_a_second():
    assert spoken.FOREIGN.words == words.WORDS
    spelt = set()
    for word in words.WORDS:
        names, seconds = synth.spelling(word, spoken.FOREIGN)
        assert len(names) < spoken.SLOTS and 0.3 <= seconds.sum() <= 0.381
        spelt.add(names)
    assert len(spelt) == len(words.WORDS)


def test_four_slow_words_fit_into_a_clip():
    longest = max(words.WORDS, key=lambda w: synth.length(w, spoken.FOREIGN))
    digit = words.WORDS.index(longest) % 10
    style = tuple(words.STYLES)[words.WORDS.index(longest) // 10]
    source = synth.Utterance((synth.DIGITS[digit],) * 4, "high", "slow")
    notes = spoken.score(source, style)
    assert notes[..., 1].sum() < (synth.SAMPLES - 512) / synth.RATE


def test_sources_are_told_apart_from_held_out_ones():
    assert not any(held_out(s) for s in spoken.sources(50, 0))
    drawn = spoken.sources(50, 0, held=True)
    assert all(held_out(s) and 2 <= len(s.words) <= 4 for s in drawn)
    assert any(a == b for s in drawn for a, b in zip(s.words, s.words[1:], strict=False))


@pytest.mark.parametrize("style", words.STYLES)
def test_true_scores_are_heard_with_all_words_voice_and_speed(style):
    for source in spoken.sources(5, 3, held=True):
        wave, said = spoken.speak_score(spoken.score(source, style))
        heard = spoken.heard(wave)
        assert heard.valid and heard.words == said
        assert (heard.voice, heard.speed) == (source.voice, source.speed)
        assert spoken.digits_heard(said) == spoken.digits_of(source)
        right = words.Translation(spoken.digits_of(source))
        assert spoken.check(wave, right).passed and spoken.check(wave, None).passed
        assert spoken.grade(wave, right) == 1.0
        # controls: another reference, and the source itself, which is English
        wrong = words.Translation(tuple(9 - d for d in right.digits))
        assert not spoken.check(wave, wrong).passed and spoken.grade(wave, wrong) < 1.0
        assert not spoken.check(sound(0, source), right).passed


def test_a_translation_is_judged_by_what_its_source_says():
    wave = spoken.speak_score(spoken.score(SOURCE, "plain"))[0]
    modality, other = SpeechModality(), synth.Utterance(("seven", "two"), "high", "slow")
    given = Condition.of({"audio": (sound(), synth.RATE)})
    assert modality.judge(wave, given).passed
    unlike = Condition.of({"audio": (sound(0, other), synth.RATE)})
    assert not modality.judge(wave, unlike).passed  # control: another source
    told = Condition.of({"audio": (sound(0, other), synth.RATE), "text": "translate: seven two"})
    assert not modality.judge(wave, told).passed
    command = synth.speak(synth.Utterance(("stop",)), np.random.default_rng(0))
    with pytest.raises(GenError, match="the sound to translate says 'stop'; expected 2 to 4"):
        modality.judge(wave, Condition.of({"audio": (command, synth.RATE)}))
    english = synth.speak(synth.parse("three seven"), np.random.default_rng(0))
    assert modality.judge(english, Condition.of("three seven")).passed


def test_a_mixture_of_styles_is_wrong():
    notes = spoken.score(SOURCE, "plain")
    notes[1] = spoken.score(SOURCE, "solemn")[1]
    verdict = spoken.check(spoken.speak_score(notes)[0], None)
    assert verdict.valid and not verdict.passed and "septem" in verdict.detail


def test_a_score_without_words_is_silence():
    wave, said = spoken.speak_score(np.zeros((4, 8, 4), np.float32))
    assert said == () and not wave.any() and wave.shape == (synth.SAMPLES,)


def test_spectra_tell_all_phonemes_apart():
    table = spoken.phone_spectra()
    distance = np.abs(table[:, None] - table[None]).max(-1) + 9 * np.eye(len(table))
    assert table.shape == (len(synth.PHONES), 14) and distance.min() > 0.2


def test_codes_of_scores_decode_to_the_nearest_score():
    phones = SpokenPhones()
    notes = phones.preprocess(spoken.score(SOURCE, "solemn"))
    codes = phones.encode(notes[None])
    assert codes.shape == (1, 4, 32)
    back = phones.decode(codes)[0]
    assert torch.equal(back[:, 0], notes[:, 0]) and torch.equal(back[:, 2], notes[:, 2])
    assert float((back[:, 1] - notes[:, 1]).abs().max()) <= spoken.STEP / 2 + 1e-6
    drawn = torch.stack([torch.randint(size, (3, 32)) for size in spoken.CODES], 1)
    assert torch.equal(phones.encode(phones.decode(drawn)), drawn)
    wave = phones.postprocess(back)
    assert wave.words == ("septem", "septem", "duo") and wave[:100].words == wave.words
    assert spoken.heard(wave).words == wave.words
    with pytest.raises(GenError, match="expected 0 to below 54, 64, 12, 16"):
        phones.decode(torch.full((1, 4, 32), 60))
    with pytest.raises(GenError, match="a sound cannot be turned into one"):
        phones.preprocess(sound())


def test_a_folder_of_tokens_is_read_back_or_refused(tmp_path):
    SpokenPhones().save_pretrained(tmp_path / "a")
    found = SpokenPhones.from_pretrained(tmp_path / "a")
    assert torch.equal(found.fingerprint, SpokenPhones().fingerprint)
    with pytest.raises(GenError, match="expected {'frontend_class': 'spoken_phones'"):
        SpokenPhones.from_pretrained(ZOO / "text-dag-words")


def test_a_sound_is_the_same_condition_in_every_form(tmp_path):
    soundfile.write(tmp_path / "a.wav", sound(), synth.RATE, subtype="FLOAT")
    forms = [tmp_path / "a.wav", (sound(), synth.RATE), (tmp_path / "a.wav").read_bytes()]
    found = {parsed(audio=form) for form in forms}
    assert len(found) == 1 and len({str(source) for source in found}) == 1
    assert parsed(audio=(sound(1), synth.RATE)) not in found  # control: other gaps
    told = parsed(audio=forms[1], text="translate: seven seven two")
    assert told.reference.digits == (7, 7, 2) and told not in found
    assert torch.equal(torch.tensor(told.wave), torch.tensor(found.pop().wave))


def test_loudness_and_silence_at_the_end_do_not_count():
    wave = sound()
    expected = spoken.trimmed(wave)
    assert len(expected) % (2 * synth.FRAME) == 0 and len(expected) < len(wave)
    assert np.allclose(spoken.trimmed(0.25 * wave[: len(expected)]), expected, atol=1e-6)
    assert not np.allclose(spoken.trimmed(wave[640:])[:9000], expected[:9000], atol=1e-2)  # control


def test_a_sound_of_another_rate_is_resampled():
    from gen.media.resample import resample

    higher = resample(sound()[:, None], synth.RATE, 48_000)[:, 0]
    found = parsed(audio=(higher, 48_000)).wave
    expected = spoken.trimmed(sound())
    size = min(len(found), len(expected))
    assert np.corrcoef(found[:size], expected[:size])[0, 1] > 0.98


def test_only_another_rate_is_resampled_and_a_failure_is_one_sentence(monkeypatch):
    asked = []

    def every_third(wave, rate, target):
        asked.append((rate, target))
        return wave[::3]

    monkeypatch.setattr(spoken, "resample", every_third)
    expected = parsed(audio=(sound(), synth.RATE)).wave
    found = parsed(audio=(np.repeat(sound(), 3), 48_000)).wave
    assert np.array_equal(found, expected) and set(asked) == {(48_000, synth.RATE)}

    def refuse(wave, rate, target):
        raise GenError("torchaudio is missing")

    monkeypatch.setattr(spoken, "resample", refuse)
    with pytest.raises(GenError, match="48000 samples per second; expected 16000. torchaudio"):
        parsed(audio=(np.repeat(sound(), 3), 48_000))


LONG = (np.full(synth.SAMPLES + 1, 0.1, np.float32), synth.RATE)
WRONG = {
    "image": ({"audio": "a.png"}, "audio is 'a.png', an image; expected a sound"),
    "missing": ({"audio": "a.wav"}, "a.wav does not exist"),
    "unreadable": ({"audio": b"x" * 50}, "expected a sound file such as WAV"),
    "long": ({"audio": LONG}, "has 38401 samples, 2.40 s; expected at most 2.4 s"),
    "stereo": ({"audio": (np.ones((99, 2), np.float32), 16_000)}, "has 2 channels; expected 1"),
    "rate": ({"audio": np.ones(99, np.float32)}, r"no sampling rate; expected \(wave, rate\)"),
    "silent": ({"audio": (np.zeros(99, np.float32), 16_000)}, "is silent; expected 2 to 4"),
    "two": ({"audio": [LONG, LONG]}, "takes at most 1 audio; got 2"),
    "images": ({"image": np.zeros((4, 4, 3), np.uint8)}, "takes audio and text .* got images"),
    "no sound": ({"text": "translate: two two"}, "without a sound; expected the sound"),
    "text": ({"text": "two", "audio": (sound(), 16_000)}, "the text beside the sound: .*translate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_condition_is_one_sentence(case):
    given, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        parsed(**given)
    assert "\n" not in str(caught.value)


def test_a_model_that_speaks_words_refuses_a_sound():
    with pytest.raises(GenError, match="the condition is a sound, and the model speaks words"):
        SpeechModality().prompt_words(parsed(audio=(sound(), synth.RATE)))


def test_scales_of_voices_make_no_next_scale_model():
    assert protocols_of("speech-translation") == ("lattice",)
    assert "scales" in protocols_of("image-scales")  # control
    pipe = gen.load("speech", "speech-translation")
    assert pipe.config["sampler"] == {"name": "joint_viterbi"}
    assert pipe({"audio": (sound(), synth.RATE)}, seed=0).tokens.shape == (1, 128)


def test_a_file_of_a_translation_names_its_words(tmp_path):
    wave = TranslatedSpeech.of(spoken.speak_score(spoken.score(SOURCE, "plain"))[0], ("sette",))
    SpeechModality().save(wave, tmp_path / "a.wav", {"seed": 3})
    SpeechModality().save(np.asarray(wave), tmp_path / "b.wav", {"seed": 3})
    assert b"sette" in (tmp_path / "a.wav").read_bytes()
    assert b"sette" not in (tmp_path / "b.wav").read_bytes()  # control


# --- the model of the zoo


@pytest.fixture(scope="module")
def pipe():
    return gen.load("speech", "speech-translation")


@pytest.fixture(scope="module")
def spoken_sources():
    return spoken.sources(3, 77, held=True)


@pytest.mark.slow
def test_translations_are_right_and_the_same_alone_and_in_a_batch(pipe, spoken_sources):
    prompts = [{"audio": (sound(i, s), synth.RATE)} for i, s in enumerate(spoken_sources)]
    whole = pipe(prompts, "joint_viterbi", seed=0, **PLAIN)
    for i, (wave, source) in enumerate(zip(whole.media, spoken_sources, strict=True)):
        assert spoken.digits_heard(spoken.heard(wave).words) == spoken.digits_of(source)
        assert spoken.digits_heard(wave.words) == spoken.digits_of(source)
        assert whole.stats[i].nfe == 1
        alone = pipe(prompts[i], "joint_viterbi", seed=0, **PLAIN)
        assert torch.equal(alone.tokens[0], whole.tokens[i])
        assert np.array_equal(alone.media[0], wave)
    assert not torch.equal(whole.tokens[0], whole.tokens[1])  # control


@pytest.mark.slow
def test_the_model_refuses_words_and_frontends_of_others(pipe, tmp_path):
    with pytest.raises(GenError, match="translates a sound; expected the part audio"):
        pipe("three seven", "joint_viterbi", **PLAIN)
    modality, config = SpeechModality(), pipe.components["model"].config
    with pytest.raises(GenError, match=f"expected '{TRANSLATION_TOKENS}'"):
        modality.bind(config, modality.frontend(), "m")
    config.source_digest, kept = "0" * 16, config.source_digest
    with pytest.raises(GenError, match="reads the tokens of another codec"):
        modality.bind(config, SpokenPhones(), "m")
    config.source_digest = kept
