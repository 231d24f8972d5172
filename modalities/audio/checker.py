"""Checker of the sounds of bouncing balls, which reads the waveform alone.

1. Onsets are the peaks of the spectral flux: the sum over frequencies of the growth of the
   logarithmic magnitude between windows, where it exceeds mean + 2 standard deviations of the clip.
2. The pitch of an onset is the highest peak of the autocorrelation of the 30 ms that follow it.
3. The loudness is the root mean square of the same 30 ms.

A sound without an onset is silent. Times are frames of the clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.contracts.modality import Verdict
from gen.modalities.audio.balls import FREQUENCIES, HOP, LOUDNESS, RATE, touches
from gen.modalities.audio.captions import Ball, Caption, natural

STEP, WINDOW = HOP // 16, HOP // 8  # samples between windows, and of a window
COMPRESSION = 100.0  # magnitudes m count as log(1 + COMPRESSION * m)
FLOOR = 0.15  # least flux of an onset
APART = HOP // 2  # samples: the least distance of two onsets
LISTEN = 3 * RATE // 100  # samples: 30 ms
LAGS = (RATE // 1000, RATE // 250)  # samples: periods of 1000 to 250 Hz
TUNED = 0.03  # largest relative error of a pitch


@dataclass(frozen=True)
class Heard:
    """Onset: its frame, its frequency in Hz, and its root mean square."""

    frame: int
    hertz: float
    level: float

    @property
    def pitch(self) -> str | None:
        """Pitch within ``TUNED`` of the frequency, if there is one."""
        near = (p for p, f in FREQUENCIES.items() if abs(self.hertz / f - 1) <= TUNED)
        return next(near, None)

    @property
    def loud(self) -> bool:
        """Whether the level is that of a loud hit rather than of a soft one."""
        border = (LOUDNESS["slow"] * LOUDNESS["fast"]) ** 0.5
        return self.level * 2**0.5 > border * 0.8  # tones decay while they are measured


def flux(wave: np.ndarray) -> np.ndarray:
    """Spectral flux of a wave [n]: float [n // STEP], of the window that begins at each step."""
    padded = np.pad(np.asarray(wave, np.float64), (WINDOW, WINDOW))
    count = len(wave) // STEP + WINDOW // STEP
    windows = np.stack([padded[i * STEP : i * STEP + WINDOW] for i in range(count)])
    magnitude = np.abs(np.fft.rfft(windows * np.hanning(WINDOW), axis=1)) * 4 / WINDOW
    level = np.log1p(COMPRESSION * magnitude)
    grown = np.diff(level, axis=0, prepend=level[:1]).clip(0).sum(1)
    # a window's growth is that of the samples it has new, which stand at its end
    return grown[1 : len(wave) // STEP + 1]


def onsets(wave: np.ndarray) -> list[int]:
    """First samples of the sounds in a wave [n], ascending."""
    rise = flux(wave)
    if not len(rise) or rise.max() < FLOOR:
        return []
    limit = max(float(rise.mean() + 2 * rise.std()), FLOOR)
    strong = [int(i) for i in np.argsort(-rise, kind="stable") if rise[i] > limit]
    kept: list[int] = []
    for i in strong:
        if all(abs(i - k) * STEP >= APART for k in kept):
            kept.append(i)
    return sorted(_start(wave, k) for k in kept)


def _start(wave: np.ndarray, step: int) -> int:
    """First sample above a tenth of the peak around the sound that a step of the flux found."""
    begin = max(0, (step - 3) * STEP)
    part = np.abs(wave[begin : (step + 4) * STEP])
    quiet = part[:STEP].max(initial=0.0)
    above = np.flatnonzero(part > quiet + 0.1 * (part.max(initial=0.0) - quiet))
    return begin + int(above[0]) if len(above) else step * STEP


def frequency(part: np.ndarray) -> float:
    """Frequency of a short sound [n] in Hz, by autocorrelation; 0 for silence."""
    x = np.asarray(part, np.float64) - np.mean(part)
    first, last = LAGS
    if len(x) <= last + 1 or not np.any(x):
        return 0.0
    products = np.array([float(x[: len(x) - lag] @ x[lag:]) for lag in range(last + 2)])
    lag = first + int(products[first : last + 1].argmax())
    before, here, after = products[lag - 1 : lag + 2]
    bend = before - 2 * here + after
    return RATE / (lag + (0.5 * (before - after) / bend if bend else 0.0))


def listen(wave: np.ndarray) -> list[Heard]:
    """Onsets of a wave [n] with their pitch and level."""
    wave, out = np.asarray(wave, np.float64), []
    for start in onsets(wave):
        part = wave[start : start + LISTEN]
        level = float(np.sqrt(np.mean(part**2)))
        out.append(Heard(round(start / HOP), frequency(part), level))
    return out


def matches(heard: list[Heard], frames: list[int], within: int = 1) -> list[tuple[int, int]]:
    """Pair onsets with frames at most ``within`` apart, one to one, nearest first.

    Returns:
        Pairs (index of an onset, index of a frame).
    """
    near = sorted(
        (abs(h.frame - f), i, j)
        for i, h in enumerate(heard)
        for j, f in enumerate(frames)
        if abs(h.frame - f) <= within
    )
    pairs: list[tuple[int, int]] = []
    for _, i, j in near:
        if all(i != a and j != b for a, b in pairs):
            pairs.append((i, j))
    return sorted(pairs)


def agreement(heard: list[Heard], caption: Caption) -> float:
    """Share of a caption that a sound shows, 0 to 1: every ball states a pitch or a number."""
    if not caption.balls:
        return 1.0 if heard else 0.0
    counts = {pitch: sum(h.pitch == pitch for h in heard) for pitch in FREQUENCIES}
    asked: dict[str | None, list[Ball]] = {}
    for ball in caption.balls:
        asked.setdefault(ball.sounds, []).append(ball)
    points = []
    for pitch, balls in asked.items():
        got = counts[pitch] if pitch else len(heard)
        numbers = [b.bounces for b in balls]
        total = None if None in numbers else sum(n for n in numbers if n)
        points.append(float(got > 0 if total is None else got == total))
    if None not in asked:
        points.append(float(all(h.pitch in asked for h in heard)))
    return float(np.mean(points))


def check(wave: np.ndarray, caption: Caption) -> Verdict:
    """Judge a sound [n]: every hit has a known pitch, and numbers and pitches are as stated."""
    heard = listen(wave)
    if not heard:
        return Verdict(False, False, "the sound is silent")
    wrong = [h for h in heard if h.pitch is None]
    if wrong:
        return Verdict(False, False, f"a hit at frame {wrong[0].frame} has {wrong[0].hertz:.0f} Hz")
    passed = agreement(heard, caption) == 1.0
    told = ", ".join(f"{h.pitch} at frame {h.frame}" for h in heard)
    return Verdict(passed, True, "" if passed else f"heard {told}; expected {str(caption)!r}")


def pitch_of(colour: str, caption: Caption) -> str:
    """Pitch of a ball that a clip shows: the stated one, or else that of its colour. A caption of
    one ball without a colour is about every ball.
    """
    for ball in caption.balls:
        about = ball.colour == colour or (ball.colour is None and len(caption.balls) == 1)
        if about and ball.pitch:
            return ball.pitch
    return natural(colour)


def check_clip(wave: np.ndarray, frames: np.ndarray, caption: Caption) -> Verdict:
    """Judge a sound [n] for a clip: a hit within one frame of every touch of a wall and no other,
    each with the pitch that the caption states, or else that of the ball's colour.
    """
    heard, seen = listen(wave), touches(frames)
    pairs = matches(heard, [frame for frame, _ in seen])
    wanted = [pitch_of(colour, caption) for _, colour in seen]
    valid = bool(heard) and all(h.pitch for h in heard)
    if len(pairs) != max(len(heard), len(seen)):
        detail = f"{len(pairs)} of {len(seen)} hits of the clip among {len(heard)} that are heard"
        return Verdict(False, valid, detail)
    for i, j in pairs:
        if heard[i].pitch != wanted[j]:
            hertz = f"{heard[i].hertz:.0f} Hz"
            return Verdict(False, valid, f"the hit in frame {seen[j][0]} has {hertz}")
    return Verdict(valid, valid, "" if valid else "the sound is silent")
