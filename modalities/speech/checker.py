"""Checker of spoken words, which reads the waveform alone.

The vocabulary is small and every word has one pronunciation, so listening is a search without a
trained judge:

1. Every 10 ms become a mel cepstrum and its slope. Loudness is measured against the clip's own
peak, and power below a floor is ignored, so gain, faint noise and lost phases change little.
2. Templates of all words, spoken by voices that never occur in the data, compete in one pass of
dynamic programming over the clip. Words may stretch, silence lies between them, and every word has
a price, so that noise does not become words.
3. The voice is read from the fundamental frequency of the words heard, the speed from their
lengths.

A clip is invalid if its words lie too far from their templates or are far too long or too short, or
if it has no words. An invalid clip never passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from gen.contracts.modality import Verdict
from gen.modalities.speech import synth as spoken
from gen.modalities.speech.synth import (
    ENGLISH,
    FRAME,
    PULSES,
    RATE,
    SAMPLES,
    STRETCH,
    Lexicon,
    Utterance,
)

MAX_DISTANCE = (
    1.0  # mean distance between the frames of a word and its template; a farther one is no word
)
HOP, WINDOW = 160, 400  # samples
MELS, CEPSTRA = 30, 14
FLOOR = 3e-4  # of the loudest band's power
LEVEL_WEIGHT, SLOPE_WEIGHT = 0.35, 1.0
WORD_COST, STAY_COST, SKIP_COST = 6.0, 0.25, 0.25  # in distances of one frame
# of a frame's distance to silence, so that a badly spoken word is misheard rather than skipped
LOUD_COST = 1.5
# power of the spectrum whose transform gives the period; 2 would let a strong formant outvote the
# pulses
FLATNESS = 0.8
PITCHES = (65.0, 280.0)  # Hz
# Hz: a melody falls by 25 Hz at most, so 75..100, 125..150 and 200..225 are the voices
PITCH_BORDERS = (112.0, 174.0)
PACE_BORDERS = (0.92, 1.13)  # words measure 3 % too long
PACES = (0.65, 1.45)  # limits of the pace of speech


@dataclass(frozen=True)
class Transcript:
    """Content of a clip.

    Attributes:
        words: the words heard.
        voice: None without voiced sound.
        speed: None without words.
        distance: mean distance of the words to their templates, per frame; infinite without words.
        f0: median fundamental frequency in Hz; 0 without voiced sound.
        pace: length over the length at normal speed; 0 without words.
    """

    words: tuple[str, ...]
    voice: str | None
    speed: str | None
    distance: float
    f0: float
    pace: float

    @property
    def valid(self) -> bool:
        """Return whether the words are close to their templates at a human pace."""
        return (
            1 <= len(self.words) <= spoken.MAX_WORDS
            and self.distance < MAX_DISTANCE
            and PACES[0] < self.pace < PACES[1]
        )


def check(wave: object, utterance: Utterance | str) -> Verdict:
    """Judge one clip (float [38400] at 16 kHz) against an utterance."""
    return check_many([wave], [utterance])[0]


def check_many(
    waves: Sequence[object] | np.ndarray, utterances: Sequence[Utterance | str]
) -> list[Verdict]:
    """Judge clips one by one. An omitted voice or speed matches anything; words never do.

    Raises:
        ValueError: the numbers of clips and utterances differ.
    """
    if len(waves) != len(utterances):
        raise ValueError(
            f"{len(waves)} clips and {len(utterances)} utterances; expected one utterance per clip"
        )
    parsed = [spoken.parse(u) if isinstance(u, str) else u for u in utterances]
    return [judge(hear(w), u) for w, u in zip(waves, parsed, strict=True)]


def judge(heard: Transcript, utterance: Utterance) -> Verdict:
    """Judge a transcript against an utterance."""
    if not heard.valid:
        detail = (
            f"{len(heard.words)} words at distance {heard.distance:.2f}, pace {heard.pace:.2f}"
            if heard.words
            else "no words"
        )
        return Verdict(False, False, f"not speech: {detail}")
    figures = [f"{heard.f0:.0f} Hz", f"pace {heard.pace:.2f}", f"distance {heard.distance:.2f}"]
    matches = utterance.voice in (None, heard.voice) and utterance.speed in (None, heard.speed)
    passed = heard.words == utterance.words and matches
    return Verdict(
        passed,
        True,
        f"heard {Utterance(heard.words, heard.voice, heard.speed)} ({', '.join(figures)})",
    )


def grade(wave: object, utterance: Utterance | str) -> float:
    """Return the share of an utterance that a clip (float [n] at 16 kHz) says.

    The share of right words is one minus their edit distance, in words of the longer side. It is
    multiplied by the share of voice, speed and speech that are as they should be, of those stated.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    parsed = spoken.parse(utterance) if isinstance(utterance, str) else utterance
    heard = hear(wave)
    longest = max(len(heard.words), len(parsed.words))
    right = 1 - _edits(heard.words, parsed.words) / longest
    stated = [(parsed.voice, heard.voice), (parsed.speed, heard.speed)]
    matches = [heard.valid, *(want == got for want, got in stated if want is not None)]
    return right * sum(matches) / len(matches)


def _edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the words to insert, remove or replace between two sequences."""
    row = list(range(len(other) + 1))
    for i, word in enumerate(one, 1):
        before, row = row, [i]
        for j, there in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != there)))
    return row[-1]


def hear(wave: object, lexicon: Lexicon = ENGLISH) -> Transcript:
    """Transcribe a clip.

    Args:
        wave: float [n] in [-1, 1] at 16 kHz, n at most 38400.
        lexicon: language of the words.

    Raises:
        ValueError: the array has another shape or type.
    """
    x = _clip(wave)
    words = _search(_features(x), lexicon) if np.abs(x).max() > 1e-5 else []
    if not words:
        return Transcript((), None, None, float("inf"), 0.0, 0.0)
    f0 = _pitch(x, [(a, b) for _, a, b, _ in words])
    frames = sum(b - a for _, a, b, _ in words)
    pace = frames * HOP / RATE / sum(spoken.length(w, lexicon) for w, *_ in words)
    voice = list(PULSES)[int(np.searchsorted(PITCH_BORDERS, f0))] if f0 else None
    speed = sorted(STRETCH, key=STRETCH.get)[int(np.searchsorted(PACE_BORDERS, pace))]
    return Transcript(
        tuple(w for w, *_ in words),
        voice,
        speed,
        float(sum(c for *_, c in words) / frames),
        f0,
        pace,
    )


def _clip(wave: object) -> np.ndarray:
    x = np.asarray(wave.detach().cpu() if isinstance(wave, Tensor) else wave)
    if x.ndim == 2 and len(x) == 1:
        x = x[0]
    if x.ndim != 1 or not 0 < len(x) <= SAMPLES or x.dtype.kind != "f":
        raise ValueError(
            f"the clip is {x.dtype} {list(x.shape)}; expected float [n], 0 < n <= {SAMPLES}, at"
            f" {RATE} Hz"
        )
    # trailing silence may be missing
    return np.pad(np.where(np.isfinite(x), x, 0.0).astype(np.float64), (0, SAMPLES - len(x)))


# --- Features


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray]:
    """Mel filters [257, MELS] and a cosine transform [MELS, CEPSTRA]."""
    bank = mel_filter_bank(257, MELS, 80.0, 7600.0, RATE, norm=None, mel_scale="htk")
    cosines = np.cos(np.pi * np.outer(np.arange(MELS) + 0.5, np.arange(CEPSTRA)) / MELS) * np.sqrt(
        2 / MELS
    )
    cosines[:, 0] *= LEVEL_WEIGHT
    return bank, cosines


def _features(x: np.ndarray) -> np.ndarray:
    """Cepstra and their slopes, frame k around sample 160 k: float32 [K, 2 * CEPSTRA]; silence is
    zero.
    """
    bank, cosines = _bank()
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(x, WINDOW // 2), WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), 512, axis=1)) ** 2 @ bank
    cepstra = np.log1p(power / (FLOOR * power.max())) @ cosines / 4
    padded = np.pad(cepstra, ((2, 2), (0, 0)), "edge")
    slope = (2 * (padded[4:] - padded[:-4]) + padded[3:-1] - padded[1:-3]) / 10
    return np.concatenate([cepstra, SLOPE_WEIGHT * slope], 1).astype(np.float32)


@functools.cache
def _templates(lexicon: Lexicon) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Word of every template, its features [S, N, D] padded at the front, and its number of frames
    [N].
    """
    rng, names, pieces = np.random.default_rng(0), [], []
    for word in lexicon.words:
        for n, scale, stretch in spoken.VOICES_EXTRA:
            frames = round(spoken.length(word, lexicon) * stretch * RATE / HOP)
            exact = frames * HOP / RATE / spoken.length(word, lexicon)
            x = spoken.synthesise((word,), [n], scale, exact, [0.1], rng, lexicon)
            names.append(word)
            pieces.append(_features(x)[10 : 10 + frames + 1])
    longest = max(map(len, pieces))
    table = np.zeros((longest, len(pieces), pieces[0].shape[1]), np.float32)
    for k, piece in enumerate(pieces):
        table[-len(piece) :, k] = piece
    return tuple(names), table, np.array([len(p) for p in pieces])


# --- Search


def _distances(features: np.ndarray, table: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Distance of every frame to every state [K, S, N]; infinite before the first state."""
    states, count, _ = table.shape
    norms = np.where(np.arange(states)[:, None] < first, np.inf, (table**2).sum(2))
    squares = features @ (-2 * table.reshape(states * count, -1).T)
    squares += norms.astype(np.float32).ravel()
    squares += (features**2).sum(1)[:, None]
    return np.sqrt(np.maximum(squares, 0, out=squares), out=squares).reshape(-1, states, count)


def _search(features: np.ndarray, lexicon: Lexicon) -> list[tuple[str, int, int, float]]:
    """Cheapest sequence of words: (word, first frame, frame after the last, cost of its frames), in
    order.

    Every template is a chain of states, one per frame. A path enters its first state from silence
    and leaves its last into silence. In between it stays, advances by one, or by two.
    """
    names, table, lengths = _templates(lexicon)
    states, count, _ = table.shape
    first, columns = states - lengths, np.arange(count)
    distance = _distances(features, table, first)
    quiet = LOUD_COST * np.sqrt((features**2).sum(1))

    # two rows lie ahead of the first state, for the steps from there
    cost = np.full((states + 2, count), np.inf, np.float32)
    since = np.zeros((states + 2, count), np.int32)
    # cost of the best path that is in silence now, and the frame at which its last word ended
    silence, silent_from = 0.0, -1
    # per frame: the best template to leave, the frame at which it was entered, the cost
    ends: list[tuple[int, int, float]] = []
    # silence at frame t: the frame at which its last word ended, or -1, and its cost
    links = np.zeros(len(features) + 1, np.int64)
    links[0] = -1
    paid = np.zeros(len(features) + 1)
    for t in range(len(features)):
        new, entry = cost[2:] + np.float32(STAY_COST), since[2:].copy()
        for step, came in (
            (cost[1:-1], since[1:-1]),
            (cost[:-2] + np.float32(SKIP_COST), since[:-2]),
        ):
            better = step < new
            np.copyto(new, step, where=better)
            np.copyto(entry, came, where=better)
        enter = np.float32(silence + WORD_COST)
        fresh = new[first, columns] > enter
        new[first[fresh], columns[fresh]] = enter
        entry[first[fresh], columns[fresh]] = t
        new += distance[t]
        cost[2:], since[2:] = new, entry
        last = int(new[-1].argmin())
        leave = float(new[-1, last])
        ends.append((last, int(entry[-1, last]), leave))
        stay = silence + float(quiet[t])
        if leave < stay:
            silence, silent_from = leave, t
        else:
            silence = stay
        links[t + 1], paid[t + 1] = silent_from, silence

    words: list[tuple[str, int, int, float]] = []
    end = int(links[-1])
    while end >= 0:
        template, entered, leave = ends[end]
        words.append((names[template], entered, end + 1, leave - float(paid[entered]) - WORD_COST))
        end = int(links[entered])
    return words[::-1]


# --- Voice


def _pitch(x: np.ndarray, spans: list[tuple[int, int]]) -> float:
    """Median fundamental frequency (Hz) of the voiced frames in some spans; 0 without any."""
    low = np.fft.rfft(x)
    low[np.fft.rfftfreq(len(x), 1 / RATE) > 1500] = 0
    y = np.pad(np.fft.irfft(low, len(x)), FRAME)
    centres = np.concatenate([np.arange(a, b) for a, b in spans]) * HOP + FRAME
    frames = y[centres[:, None] + np.arange(-FRAME // 2, FRAME // 2)]
    loud = (frames**2).mean(1)
    frames = frames[loud > 0.02 * loud.max()]
    window = np.hanning(FRAME)
    both = [
        np.fft.irfft(np.abs(np.fft.rfft(f, 2 * FRAME)) ** FLATNESS)[..., : FRAME // 2]
        for f in (frames * window, window)
    ]
    r = (both[0] / both[0][:, :1]) / (both[1] / both[1][0])
    a, b = int(RATE / PITCHES[1]), int(RATE / PITCHES[0])
    peaks = np.where(
        (r[:, a:b] >= r[:, a - 1 : b - 1]) & (r[:, a:b] >= r[:, a + 1 : b + 1]), r[:, a:b], 0
    )
    best = peaks.max(1)
    voiced = best > 0.6
    if not voiced.any():
        return 0.0
    lag = (peaks > 0.85 * best[:, None]).argmax(
        1
    ) + a  # the shortest period that fits nearly as well as the best
    return float(np.median(RATE / lag[voiced]))
