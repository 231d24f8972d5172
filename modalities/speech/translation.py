"""Spoken digits in, spoken digits of another language out.

A source is the sound of 2 to 4 English digits. A right output says them in the same order, all in
one of the two styles of ``gen.modalities.text.translation``: plain (``sette sette due``) or solemn
(``septem septem duo``). Nothing in the source tells which. Voice and speed stay those of the
source. ``FOREIGN`` holds the pronunciations, from the phonemes of ``gen.modalities.speech.synth``.

The tokens of an output are up to 4 words of 8 slots each, and a slot has 4 codes:

    phoneme     the word itself in the first slot, whose sound is silence; then its phonemes
    duration    in steps of 5 ms; 0 for a slot without sound
    pulses      glottal pulses per frame of 640 samples: the pitch, in steps of 25 Hz
    scale       length of the vocal tract
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.media.given import GivenMedia
from gen.media.resample import resample
from gen.modalities.small_language import draw_conditions
from gen.modalities.speech import synth
from gen.modalities.speech.checker import Transcript, hear
from gen.modalities.text import translation
from gen.modalities.text.translation import Translation

LENGTHS = range(2, synth.MAX_WORDS + 1)  # digits of a source
SLOTS = 8  # of a word: its silence, and up to 7 phonemes
PHONE_NAMES = tuple(synth.PHONES)
STEP = 0.005  # seconds of a step of durations
DURATIONS, PULSES = 64, 12  # codes of durations and pulses
SCALES = (0.95, 0.025, 16)  # first scale, step, number of codes
SILENT = 1e-4  # peak below which a sound holds nothing
AUDIBLE = 0.01  # lower values at the end of a wave are silence

FOREIGN = synth.Lexicon(
    tuple(
        zip(
            translation.WORDS,
            (
                "D 15 Z 75 EH 110 R 55 AO 110",  # zero
                "UW 160 N 90 OW 130",  # uno
                "D 15 UW 170 EY 170",  # due
                "t 40 T 20 R 70 EY 210",  # tre
                "k 35 K 20 W 55 AA 95 T 25 R 50 AO 100",  # quattro
                "S 75 IY 80 N 55 K 25 W 50 EY 90",  # cinque
                "S 100 EH 110 IY 150",  # sei
                "S 85 EH 105 t 50 T 25 AE 105",  # sette
                "AO 140 t 60 T 25 OW 140",  # otto
                "N 80 AO 115 V 70 EY 110",  # nove
                "N 80 IY 100 H 40 IH 70 L 90",  # nihil
                "UW 110 N 80 AH 80 S 110",  # unus
                "D 15 UW 160 AO 170",  # duo
                "t 40 T 20 R 60 EH 130 S 110",  # tres
                "K 25 W 60 AE 80 t 40 T 20 UW 70 ER 85",  # quattuor
                "K 25 W 60 IY 80 N 60 K 25 W 50 EH 80",  # quinque
                "S 90 EH 110 k 50 K 20 S 110",  # sex
                "S 75 EH 90 p 40 P 20 T 25 EH 75 N 55",  # septem
                "AA 120 k 50 K 20 T 25 AO 130",  # octo
                "N 75 OW 115 V 60 AX 60 N 70",  # novem
            ),
            strict=True,
        )
    )
)
CODES = (len(PHONE_NAMES) + len(translation.WORDS), DURATIONS, PULSES, SCALES[2])


@dataclass(frozen=True)
class SpokenSource:
    """Sound to translate.

    Attributes:
        sound: the sound; equal content makes equal conditions.
        reference: what it says, for the checker alone; None where nobody said it.
    """

    sound: GivenMedia
    reference: Translation | None = None

    def __str__(self) -> str:
        return f"{self.reference or translation.START} ({self.sound})"

    @functools.cached_property
    def wave(self) -> np.ndarray:
        """The sound as the model takes it, float32 [n] (``clip``)."""
        return clip(self.sound)


def clip(sound: GivenMedia) -> np.ndarray:
    """Return a sound of at most 2.4 s as ``trimmed`` does.

    Raises:
        GenError: several channels, no sampling rate, a longer sound, or silence.
    """
    wave, rate = sound.array, sound.rate
    if rate is None:
        raise GenError("the sound to translate has no sampling rate; expected (wave, rate)")
    if wave.shape[1] != 1:
        raise GenError(f"the sound to translate has {wave.shape[1]} channels; expected 1")
    seconds, most = len(wave) / rate, synth.SAMPLES / synth.RATE
    if seconds > most:
        raise GenError(
            f"the sound to translate has {len(wave)} samples, {seconds:.2f} s; expected at most"
            f" {most:g} s"
        )
    if rate != synth.RATE:
        try:
            wave = resample(wave, rate, synth.RATE)
        except GenError as error:
            raise GenError(
                f"the sound to translate has {rate} samples per second; expected {synth.RATE}."
                f" {error}"
            ) from None
    if float(np.abs(wave).max()) < SILENT:
        raise GenError("the sound to translate is silent; expected 2 to 4 spoken digits")
    return trimmed(wave[: synth.SAMPLES, 0])


def trimmed(wave: np.ndarray) -> np.ndarray:
    """Return a wave as loud as those of training, without the silence at its end: float32 [n], n a
    multiple of 1280.

    Args:
        wave: float [n] at 16 kHz, not silent.
    """
    wave = wave * (synth.PEAK / np.abs(wave).max())
    samples = int(np.flatnonzero(np.abs(wave) > AUDIBLE)[-1]) + 1
    unit = 2 * synth.FRAME
    out = np.zeros(-(-samples // unit) * unit, np.float32)
    out[:samples] = wave[:samples]
    return out


def source_tokens(codec: TokenFrontend, waves: Sequence[np.ndarray]) -> list[list[int]]:
    """Return the tokens of waves: codes of a frame, stream q's shifted by q codebooks, frame after
    frame. A causal codec gives a wave the same tokens beside longer ones.

    Args:
        codec: codec of the waves, all of whose codebooks have one size.
        waves: float32 [n] each (``trimmed``).
    """
    longest = max(map(len, waves))
    x = torch.stack([codec.preprocess(np.pad(wave, (0, longest - len(wave)))) for wave in waves])
    codes, sizes = codec.encode(x), codec.config.codebook_sizes
    shift = sizes[0] * torch.arange(len(sizes), device=codes.device)
    rows = (codes.transpose(1, 2) + shift).flatten(1).tolist()
    streams = len(sizes)
    return [
        row[: len(wave) // synth.FRAME * streams] for row, wave in zip(rows, waves, strict=True)
    ]


# --- The dataset


def draw_source(rng: np.random.Generator) -> synth.Utterance:
    """Draw what a source says: 2 to 4 digits of which some repeat, a voice and a speed."""
    digits: list[int] = []
    for _ in range(int(rng.choice(LENGTHS))):
        repeat = bool(digits) and rng.random() < 0.2
        digits.append(digits[-1] if repeat else int(rng.integers(10)))
    return synth.Utterance(
        tuple(synth.DIGITS[digit] for digit in digits),
        synth.VOICES[rng.integers(len(synth.VOICES))],
        synth.SPEEDS[rng.integers(len(synth.SPEEDS))],
    )


def sources(n: int, seed: int, held: bool = False) -> list[synth.Utterance]:
    """Draw what ``n`` sources say, all held out or none of them."""
    return draw_conditions(n, seed, draw_source, held)


def digits_of(source: synth.Utterance) -> tuple[int, ...]:
    """Return the numbers that a source says."""
    return tuple(synth.DIGITS.index(word) for word in source.words)


def score(source: synth.Utterance, style: str) -> np.ndarray:
    """Return how a source is to be spoken in a style, float32 [4, 8, 4].

    A slot holds its phoneme or word, its seconds, its pulses and its scale; slots without sound are
    zero.

    Args:
        source: utterance with voice and speed stated.
        style: ``plain`` or ``solemn``.
    """
    assert source.voice and source.speed, "sources of the dataset state both"
    stretch = synth.STRETCH[source.speed]
    out = np.zeros((synth.MAX_WORDS, SLOTS, len(CODES)), np.float32)
    for i, digit in enumerate(digits_of(source)):
        word = translation.STYLES[style][digit]
        names, seconds = synth.spelling(word, FOREIGN)
        gap = np.mean(synth.GAP) * stretch if i else np.mean(synth.LEAD)
        falls = i == len(source.words) - 1 and i > 0  # the melody falls
        row = out[i, : 1 + len(names)]
        row[:, 0] = [
            len(PHONE_NAMES) + translation.WORDS.index(word),
            *map(PHONE_NAMES.index, names),
        ]
        row[:, 1] = [gap, *(seconds * stretch)]
        row[:, 2] = synth.PULSES[source.voice] - falls
        row[:, 3] = synth.SCALES[source.voice]
    return out


def speak_score(notes: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Speak a score.

    Slots without a duration are skipped. The noise has a fixed seed, so that one score is one
    sound.

    Args:
        notes: float [slots, 4] (``score``), word after word.

    Returns:
        The sound, float32 [38400], and its words.
    """
    spoken, words = [], []
    for rows in notes.reshape(-1, SLOTS, notes.shape[-1]):
        mark, rest = int(rows[0, 0]) - len(PHONE_NAMES), rows[1:][rows[1:, 1] > 0]
        rest = rest[rest[:, 0] < len(PHONE_NAMES)]
        if not len(rest):
            continue
        names = tuple(PHONE_NAMES[int(phone)] for phone in rest[:, 0])
        seconds = rest[:, 1].astype(np.float64)
        pulses, scale = max(float(rows[0, 2]), 1.0), float(rows[0, 3])
        spoken.append(synth.SpokenWord(names, seconds, float(rows[0, 1]), pulses, scale))
        if mark >= 0:
            words.append(translation.WORDS[mark])
    return synth.speak_phones(spoken, np.random.default_rng(0)), tuple(words)


@functools.cache
def phone_spectra() -> np.ndarray:
    """Return the spectrum of every phoneme, float32 [34, 14], of mean 0 and deviation 1.

    Columns are the logarithms of three formants at the start and at the end and of their widths,
    the levels of voice, breath and hiss, and the logarithms of centre and width of the hiss.
    """
    rows = [
        [
            *np.log([*p.start, *p.end, *p.widths]),
            p.voice,
            20 * p.breath,
            20 * p.hiss,
            *np.log(p.band),
        ]
        for p in synth.PHONES.values()
    ]
    table = np.array(rows)
    return ((table - table.mean(0)) / table.std(0)).astype(np.float32)


# --- The checker


def heard(wave: object) -> Transcript:
    """Transcribe a clip of the other language, from the waveform alone."""
    return hear(wave, FOREIGN)


def source_heard(wave: np.ndarray) -> Translation:
    """Return what a source says, from the waveform alone.

    Args:
        wave: float [n] at 16 kHz.

    Raises:
        GenError: it says anything but 2 to 4 digits.
    """
    found = hear(wave)
    digits = tuple(synth.DIGITS.index(word) for word in found.words if word in synth.DIGITS)
    if not found.valid or len(digits) != len(found.words) or len(digits) not in LENGTHS:
        raise GenError(
            f"the sound to translate says {' '.join(found.words) or 'nothing'!r}; expected 2 to 4"
            " spoken digits, or a text that says which they are, such as 'translate: seven two'"
        )
    return Translation(digits)


def digits_heard(words: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers that words of either style say."""
    return tuple(translation.WORDS.index(word) % 10 for word in words)


def in_one_style(words: tuple[str, ...]) -> bool:
    """Return whether all words are of one style."""
    return any(set(words) <= set(style) for style in translation.STYLES.values())


def check(wave: object, reference: Translation | None) -> Verdict:
    """Judge whether a clip says digits of the other language in one style, and those of the
    reference if there is one."""
    found = heard(wave)
    said = " ".join(found.words)
    if not found.valid:
        return Verdict(False, False, f"not speech: heard {said!r}, distance {found.distance:.2f}")
    expected = None if reference is None else reference.digits
    right = expected is None or digits_heard(found.words) == expected
    passed = right and in_one_style(found.words)
    return Verdict(passed, True, f"heard {said!r}")


def grade(wave: object, reference: Translation | None) -> float:
    """Return 1 for a clip that passes, else half the share of its digits that are in place."""
    found = heard(wave)
    if check(wave, reference).passed:
        return 1.0
    if reference is None or not found.valid:
        return 0.0
    digits, right = digits_heard(found.words), reference.digits
    same = sum(a == b for a, b in zip(digits, right, strict=False))
    return 0.5 * same / max(len(digits), len(right))
