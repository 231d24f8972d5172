"""Synthetic dataset of spoken words: the language of short utterances and the synthesiser that
speaks them.

An utterance is one to four words (digits and commands), and may state the voice and the speed:
``three seven, high voice, fast``. It becomes six slots: four words, voice, speed. Slot ``ANY``
means "not stated", slot ``NONE`` "no further word". The unconditional utterance of classifier-free
guidance has all slots ``ANY``. A model's prompt joins every slot value with its slot.

Speech is float32 at 16 kHz, 2.4 s long, from a small formant synthesiser. Every word is a list of
phonemes. Every phoneme is a target of three formants, voicing and noise, and parameters glide
between targets. Voiced sound is a sum of the vocal tract's impulse responses, one per glottal
pulse; noise is shaped in the short-time spectrum. All pulse trains are harmonics of 25 Hz counted
from the first sample, so a steady vowel repeats itself in every frame of 640 samples, and its
tokens repeat too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gen.core.errors import unknown_word
from gen.modalities.small_language import (
    draw_conditions,
)
from gen.modalities.small_language import held_out as held_out

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "back", "start")
VOICES = ("low", "middle", "high")
SPEEDS = ("slow", "normal", "fast")
WORDS = (*DIGITS, *COMMANDS)
MAX_WORDS = 4
ANY, NONE = 0, 1
TABLE = ("<any>", "<none>", *WORDS, *VOICES, *SPEEDS)  # slot value -> word
SLOTS = MAX_WORDS + 2
PAIRS = len(TABLE) * SLOTS  # (value, slot)

RATE = 16_000  # samples per second
SAMPLES = 38_400
FRAME = 640  # samples; every pulse train repeats after it
PEAK = 0.7

PULSES = {"low": 4, "middle": 6, "high": 9}  # glottal pulses per frame: 100, 150 and 225 Hz
SCALES = {
    "low": 1.0,
    "middle": 1.1,
    "high": 1.22,
}  # factor on every formant: a shorter vocal tract sounds higher
STRETCH = {"slow": 1.2, "normal": 1.0, "fast": 0.8}  # factor on every duration
# seconds of silence before the first word and between words
LEAD, GAP = ((0.040, 0.090), (0.070, 0.110))
# pulses per frame, scale, stretch: voices that never occur in the data, for the checker's templates
VOICES_EXTRA = (
    (5, 0.97, 1.0),
    (5, 1.05, 0.95),
    (8, 1.05, 1.05),
    (5, 1.15, 1.05),
    (8, 1.15, 0.95),
    (8, 1.26, 1.0),
)
SCALE_JITTER, STRETCH_JITTER = 0.015, 0.04  # of an utterance, uniform, each way


@dataclass(frozen=True)
class Utterance:
    """Utterance of one to four words. ``None`` marks an omitted voice or speed."""

    words: tuple[str, ...]
    voice: str | None = None
    speed: str | None = None

    def __str__(self) -> str:
        return ", ".join(
            [
                " ".join(self.words),
                *([f"{self.voice} voice"] if self.voice else []),
                *([self.speed] if self.speed else []),
            ]
        )

    def slots(self) -> list[int]:
        """Six integers in ``range(len(TABLE))``."""
        words = [TABLE.index(w) for w in self.words]
        return (
            words
            + [NONE] * (MAX_WORDS - len(words))
            + [TABLE.index(w) if w else ANY for w in (self.voice, self.speed)]
        )

    def pairs(self) -> list[int]:
        """Six integers in ``range(PAIRS)``: a model's prompt."""
        return pairs(np.array([self.slots()]))[0].tolist()


def pairs(slots: np.ndarray) -> np.ndarray:
    """Join every slot value with its slot: int [N, 6] -> int [N, 6]. The same word in another slot
    is another symbol, so a small model need not learn which slot a word belongs to.
    """
    return slots * SLOTS + np.arange(SLOTS)


def parse(text: str) -> Utterance:
    """Parse the text of an utterance: words, then voice and speed in any order. Digits may be
    written as figures.

    Raises:
        ValueError: a word is outside the language; the message names the first one and the nearest
            known word.
    """
    if not text or not text.strip():
        raise ValueError(
            "the prompt is empty; expected one to four words such as 'three seven, high voice,"
            " fast'"
        )
    words: list[str] = []
    stated: dict[str, str] = {}
    before = ""
    for token in re.sub(r"[.,;!?\s]+", " ", re.sub(r"([0-9])", r" \1 ", text.lower())).split():
        word = DIGITS[int(token)] if token in "0123456789" else token
        kind = "voice" if word in VOICES else "speed" if word in SPEEDS else ""
        if kind and kind in stated:
            raise ValueError(
                f"utterance {text!r} states the {kind} twice, {stated[kind]!r} and {word!r};"
                " expected one"
            )
        if kind:
            stated[kind] = word
        elif word in WORDS:
            words.append(word)
        elif not ((word == "voice" and before in VOICES) or (word == "speed" and before in SPEEDS)):
            raise unknown_word(word, (*WORDS, *VOICES, *SPEEDS), f"utterance {text!r}")
        before = word
    if not 1 <= len(words) <= MAX_WORDS:
        raise ValueError(
            f"utterance {text!r} has {len(words)} words to speak; expected one to four"
        )
    return Utterance(tuple(words), **stated)


def random_utterance(rng: np.random.Generator) -> Utterance:
    """Draw an utterance with voice and speed stated."""

    def pick(options):
        return options[rng.integers(len(options))]

    return Utterance(
        tuple(pick(WORDS) for _ in range(rng.integers(1, MAX_WORDS + 1))),
        pick(VOICES),
        pick(SPEEDS),
    )


def utterances(n: int, seed: int, *, held: bool) -> list[Utterance]:
    """Draw ``n`` utterances, all held out or none of them."""
    return draw_conditions(n, seed, random_utterance, held)


# --- Phonemes


@dataclass(frozen=True)
class Phone:
    """Target of a phoneme for a vocal tract of scale 1. Formants and bands in Hz, levels in
    amplitude.
    """

    start: tuple[float, float, float]  # F1, F2, F3
    end: tuple[float, float, float]  # F1, F2, F3 at the end, for diphthongs
    widths: tuple[float, float, float]  # bandwidths of the three
    voice: float = 0.0  # level of the glottal pulses
    breath: float = 0.0  # level of noise through the formants
    hiss: float = 0.0  # level of noise through a separate band
    band: tuple[float, float] = (4000.0, 2000.0)  # centre and half width of that band


def _voiced(
    f1: float, f2: float, f3: float, widths=(60, 90, 150), *, to=None, voice=1.0, **noise
) -> Phone:
    return Phone((f1, f2, f3), to or (f1, f2, f3), widths, voice, **noise)


def _noise(
    f1: float, f2: float, f3: float, hiss: float, band: tuple[float, float], breath=0.0
) -> Phone:
    return Phone((f1, f2, f3), (f1, f2, f3), (160, 160, 220), 0.0, breath, hiss, band)


PHONES = {
    "IY": _voiced(290, 2250, 2950, (50, 120, 250)),
    "IH": _voiced(400, 1850, 2570, (50, 100, 140)),
    "EH": _voiced(550, 1720, 2500, (60, 90, 170)),
    "AE": _voiced(690, 1660, 2430, (70, 120, 200)),
    "AA": _voiced(730, 1150, 2500, (90, 70, 160)),
    "AO": _voiced(580, 880, 2500, (80, 80, 120)),
    "AH": _voiced(640, 1230, 2550, (80, 70, 140)),
    "AX": _voiced(500, 1400, 2450, (70, 90, 140), voice=0.7),
    "UW": _voiced(310, 1050, 2200, (50, 80, 140), to=(300, 850, 2200)),
    "EY": _voiced(480, 1820, 2520, (60, 100, 160), to=(320, 2200, 2800)),
    "AY": _voiced(720, 1200, 2550, (80, 80, 160), to=(380, 2050, 2650)),
    "AW": _voiced(720, 1250, 2550, (80, 80, 150), to=(380, 870, 2350)),
    "OW": _voiced(560, 1000, 2350, (70, 80, 120), to=(340, 760, 2300)),
    "W": _voiced(290, 610, 2150, (50, 80, 90), voice=0.6),
    "Y": _voiced(260, 2200, 3000, (50, 150, 300), voice=0.6),
    "R": _voiced(330, 1080, 1450, (70, 100, 120), voice=0.7),
    "ER": _voiced(470, 1250, 1560, (80, 80, 110), voice=0.8),
    "L": _voiced(340, 1000, 2850, (60, 110, 250), voice=0.65),
    "N": _voiced(270, 1500, 2500, (70, 350, 350), voice=0.9),
    "V": _voiced(230, 1100, 2200, (70, 150, 220), voice=0.35, hiss=0.008, band=(5500, 3000)),
    "Z": _voiced(240, 1500, 2550, (70, 150, 220), voice=0.3, hiss=0.026, band=(5400, 1100)),
    "F": _noise(340, 1100, 2200, 0.018, (5500, 3000)),
    "TH": _noise(320, 1300, 2550, 0.015, (6500, 2000)),
    "S": _noise(320, 1500, 2550, 0.036, (5400, 1100)),
    "p": _noise(
        400, 1000, 2200, 0.0, (900, 600)
    ),  # closures: silence whose formants steer the neighbours' transitions
    "t": _noise(380, 1700, 2600, 0.0, (4300, 1300)),
    "k": _noise(350, 2000, 2500, 0.0, (2100, 500)),
    "P": _noise(400, 1000, 2200, 0.05, (900, 700), 0.01),  # bursts
    "T": _noise(380, 1700, 2600, 0.045, (4300, 1300)),
    "K": _noise(350, 2000, 2500, 0.06, (2100, 450)),
    "B": _voiced(300, 950, 2200, voice=0.3, hiss=0.05, band=(900, 700)),
    "D": _voiced(280, 1700, 2600, voice=0.3, hiss=0.05, band=(4000, 1300)),
    "G": _voiced(280, 1900, 2300, voice=0.3, hiss=0.07, band=(1800, 450)),
    "H": _noise(380, 1400, 2300, 0.007, (3500, 2000), 0.03),  # breath between a burst and its vowel
}

SPELLING = {  # word -> phonemes and their milliseconds at normal speed
    "zero": "Z 70 IH 75 R 65 OW 155",
    "one": "W 75 AH 150 N 115",
    "two": "T 15 H 35 UW 260",
    "three": "TH 80 R 60 IY 210",
    "four": "F 85 AO 165 ER 105",
    "five": "F 80 AY 200 V 80",
    "six": "S 90 IH 85 k 55 K 20 S 105",
    "seven": "S 80 EH 95 V 55 AX 55 N 85",
    "eight": "EY 215 t 65 T 30",
    "nine": "N 80 AY 190 N 95",
    "yes": "Y 65 EH 140 S 125",
    "no": "N 95 OW 225",
    "up": "AH 190 p 75 P 40",
    "down": "D 15 AW 240 N 105",
    "left": "L 70 EH 125 F 80 t 45 T 30",
    "right": "R 75 AY 185 t 60 T 30",
    "on": "AA 205 N 125",
    "off": "AO 200 F 130",
    "stop": "S 95 t 40 T 15 AA 135 p 50 P 35",
    "go": "G 25 OW 285",
    "back": "B 15 AE 190 k 65 K 40",
    "start": "S 90 t 40 T 15 AA 80 ER 80 t 35 T 30",
}
GLIDE = 0.040  # seconds from one phoneme's formants to the next
ATTACK = 0.016  # seconds from one phoneme's levels to the next
QUICK = 0.006  # the same where a stop opens


@dataclass(frozen=True)
class Lexicon:
    """Words of a language with their phonemes and milliseconds at normal speed, as in
    ``SPELLING``."""

    entries: tuple[tuple[str, str], ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Words in their order."""
        return tuple(word for word, _ in self.entries)


ENGLISH = Lexicon(tuple(SPELLING.items()))


@functools.cache
def spelling(word: str, lexicon: Lexicon = ENGLISH) -> tuple[tuple[str, ...], np.ndarray]:
    """Phonemes of a word and their durations in seconds at normal speed."""
    parts = dict(lexicon.entries)[word].split()
    return tuple(parts[::2]), np.array(parts[1::2], float) / 1000


def length(word: str, lexicon: Lexicon = ENGLISH) -> float:
    """Seconds that a word takes at normal speed."""
    return float(spelling(word, lexicon)[1].sum())


# --- The synthesiser

_N = 512  # samples of an impulse response, after which a formant is inaudible
_HOP = 80  # samples between frames of noise
# a delay of one sample, per frequency
_Z = np.exp(-2j * np.pi * np.arange(_N // 2 + 1) / _N).astype(np.complex64)
_HZ = (np.arange(_N // 2 + 1) * (RATE / _N)).astype(np.float32)


def speak(utterance: Utterance, rng: np.random.Generator) -> np.ndarray:
    """Synthesise speech that passes the checker for an utterance: float32 [38400] in [-1, 1]. An
    omitted voice or speed is drawn.
    """
    voice = utterance.voice or VOICES[rng.integers(len(VOICES))]
    speed = utterance.speed or SPEEDS[rng.integers(len(SPEEDS))]
    scale = SCALES[voice] * (1 + rng.uniform(-SCALE_JITTER, SCALE_JITTER))
    stretch = STRETCH[speed] * (1 + rng.uniform(-STRETCH_JITTER, STRETCH_JITTER))
    gaps = [rng.uniform(*LEAD), *(rng.uniform(*GAP) * STRETCH[speed] for _ in utterance.words[1:])]
    n = [PULSES[voice]] * len(utterance.words)
    if len(n) > 1:
        n[-1] -= 1  # the melody falls
    return synthesise(utterance.words, n, scale, stretch, gaps, rng)


def synthesise(
    words: Sequence[str],
    pulses: Sequence[int],
    scale: float,
    stretch: float,
    gaps: Sequence[float],
    rng: np.random.Generator,
    lexicon: Lexicon = ENGLISH,
) -> np.ndarray:
    """Speak each word after its gap.

    Args:
        words: up to four words.
        pulses: glottal pulses per frame, one number per word.
        scale: factor on every formant.
        stretch: factor on every duration.
        gaps: seconds of silence before each word.
        rng: generator of the noise.
        lexicon: language of the words.

    Returns:
        float32 [38400].

    Raises:
        ValueError: the words do not fit into a clip.
    """
    lengths = np.array([length(w, lexicon) for w in words]) * stretch
    starts = np.cumsum(gaps) + np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    if (starts[-1] + lengths[-1]) * RATE + _N > SAMPLES:
        raise ValueError(
            f"{' '.join(words)!r} takes {starts[-1] + lengths[-1]:.2f} s; a clip has"
            f" {(SAMPLES - _N) / RATE:.2f} s"
        )
    spoken = []
    for word, gap, n in zip(words, gaps, pulses, strict=True):
        names, durations = spelling(word, lexicon)
        spoken.append(SpokenWord(names, durations * stretch, gap, n, scale))
    return speak_phones(spoken, rng)


class SpokenWord(NamedTuple):
    """Phonemes of a word and how they are spoken.

    Attributes:
        names: phonemes.
        seconds: their durations, float [n].
        gap: seconds of silence before them.
        pulses: glottal pulses per frame.
        scale: factor on every formant.
    """

    names: tuple[str, ...]
    seconds: np.ndarray
    gap: float
    pulses: float
    scale: float


def speak_phones(words: Sequence[SpokenWord], rng: np.random.Generator) -> np.ndarray:
    """Speak phonemes: float32 [38400], cut off where a clip ends; silence for no words.

    Args:
        words: words in their order.
        rng: generator of the noise.
    """
    ends = np.cumsum([word.gap + float(word.seconds.sum()) for word in words] or [0.0])
    out = np.zeros(max(SAMPLES, int(np.ceil(ends[-1] * RATE))) + 2 * _N)
    for word, end in zip(words, ends, strict=False):
        _say(word, float(end) - float(word.seconds.sum()), rng, out)
    out = out[:SAMPLES]
    return (out * (PEAK / max(np.abs(out).max(), 1e-9))).astype(np.float32)


def _say(word: SpokenWord, start: float, rng: np.random.Generator, out: np.ndarray) -> None:
    """Add one word that begins at ``start`` seconds to ``out``."""
    names, n, scale = word.names, word.pulses, word.scale
    phones = [PHONES[p] for p in names]
    edges = start + np.concatenate([[0.0], np.cumsum(word.seconds)])
    end = edges[-1]

    # in samples
    pulse = np.arange(np.ceil(start * RATE * n / FRAME), np.floor(end * RATE * n / FRAME) + 1) * (
        FRAME / n
    )
    level = _levels([p.voice for p in phones], names, edges, pulse / RATE)
    pulse, level = pulse[level > 0], level[level > 0]
    whole = np.floor(pulse).astype(int)
    formants, widths = _tract(phones, edges, pulse / RATE, scale)
    spectra = (
        _resonance(formants, widths, scale)
        * _glottis()
        * np.exp(np.log(_Z)[None] * (pulse - whole)[:, None].astype(np.float32))
    )
    _overlap(out, whole, np.fft.irfft(spectra * level[:, None].astype(np.float32), axis=1))

    frames = np.arange(int(start * RATE) // _HOP, int(end * RATE) // _HOP + 1)
    at = frames * _HOP / RATE
    hiss, breath = (
        _levels([getattr(p, k) for p in phones], names, edges, at) for k in ("hiss", "breath")
    )
    keep = hiss + breath > 0
    frames, at, hiss, breath = frames[keep], at[keep], hiss[keep], breath[keep]
    if not len(frames):
        return
    noise = rng.standard_normal((frames[-1] - frames[0] + 2) * _HOP)
    window = np.hanning(2 * _HOP + 1)[:-1]
    blocks = np.stack([noise[i : i + 2 * _HOP] for i in (frames - frames[0]) * _HOP]) * window
    which = np.searchsorted(edges[1:-1], at, "right")
    centre, spread = (
        np.array([p.band[i] for p in phones])[which, None] * scale**0.5 for i in (0, 1)
    )
    shape = hiss[:, None] * np.exp(-0.5 * ((_HZ - centre) / spread) ** 2)
    if breath.any():
        formants, widths = _tract(phones, edges, at, scale)
        tract = np.abs(_resonance(formants, widths + 60, scale))
        shape = shape + breath[:, None] * tract / tract.max(1, keepdims=True)
    # zero phase, so half a response lies before each block
    shaped = np.roll(np.fft.irfft(np.fft.rfft(blocks, _N, axis=1) * shape, axis=1), _HOP, axis=1)
    _overlap(out, frames * _HOP, shaped)


def _levels(
    values: Sequence[float], names: Sequence[str], edges: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Level that holds each phoneme's value, with quick transitions; zero outside the word."""
    values = (0.0, *values, 0.0)
    knots, heights = [edges[0] - 1e-4], [0.0]
    for i, edge in enumerate(edges):
        opens = i < len(names) and names[i] in ("P", "T", "K", "B", "D", "G")
        before = edge - edges[i - 1] if i else np.inf
        after = edges[i + 1] - edge if i < len(names) else np.inf
        half = min(QUICK if opens else ATTACK, 0.8 * before, 0.8 * after) / 2
        low, high = edge - half, edge + half
        if i == 0:
            low, high = edge, edge + 2 * half
        elif i == len(names):
            low, high = edge - min(2 * ATTACK, before / 2), edge
        knots += [low, high]
        heights += [values[i], values[i + 1]]
    return np.interp(at, knots, heights, left=0.0, right=0.0)


def _tract(
    phones: list[Phone], edges: np.ndarray, at: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Formants and bandwidths at some times (seconds), in Hz: two [len(at), 3]."""
    knots, rows = [], []
    for phone, a, b in zip(phones, edges[:-1], edges[1:], strict=True):
        half = min(GLIDE / 2, 0.4 * (b - a))
        knots += [a + half, b - half]
        rows += [(*phone.start, *phone.widths), (*phone.end, *phone.widths)]
    columns = np.stack([np.interp(at, knots, c) for c in np.array(rows, float).T], 1)
    return columns[:, :3] * scale, columns[:, 3:]


def _resonance(formants: np.ndarray, widths: np.ndarray, scale: float) -> np.ndarray:
    """Response of the vocal tract, a cascade of resonators: complex [N, 257] over frequency."""
    out = _upper(round(float(scale), 3))
    for f, b in zip(formants.T, widths.T, strict=True):
        out = out * _resonator(f, b)
    return out


def _resonator(f: np.ndarray, width: np.ndarray) -> np.ndarray:
    radius = np.exp(-np.pi * width / RATE)
    b = (2 * radius * np.cos(2 * np.pi * f / RATE)).astype(np.float32)[:, None]
    c = (-(radius**2)).astype(np.float32)[:, None]
    return (1 - b - c) / (1 - b * _Z - c * _Z**2)


@functools.lru_cache(256)
def _upper(scale: float) -> np.ndarray:
    """Frequencies of the two fixed formants."""
    return (_resonator(np.array([3500.0 * scale, 4500.0 * scale]), np.array([220.0, 300.0]))).prod(
        0
    )[None]


@functools.cache
def _glottis() -> np.ndarray:
    """Glottal pulse as radiated by the lips: two real poles and a difference."""
    pole = np.float32(np.exp(-2 * np.pi * 220 / RATE))
    return ((1 - pole) * (1 - _Z) / (1 - pole * _Z) ** 2)[None]


def _overlap(out: np.ndarray, starts: np.ndarray, pieces: np.ndarray) -> None:
    for i, piece in zip(starts, pieces, strict=True):
        out[i : i + len(piece)] += piece
