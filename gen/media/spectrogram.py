"""Spectrogram images: time to the right, mel frequency upwards, loudness as lightness. The same
wave gives the same pixels."""

from __future__ import annotations

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 320, 120  # pixels
RANGE = 80.0  # decibels from the loudest point down to black
# power of the loudest point at least: -100 dB of a full-scale sine, so that silence stays black
QUIET = 1e-10
WINDOW = 0.046  # seconds, rounded up to a power of two in samples
# Night blue over violet and orange to cream. Each anchor sits where its own lightness says, so that
# equal steps in decibels
# are equal steps to the eye.
ANCHORS = (
    (10, 11, 26),
    (38, 29, 82),
    (84, 40, 120),
    (139, 48, 121),
    (193, 64, 98),
    (231, 103, 70),
    (247, 159, 68),
    (250, 211, 120),
    (253, 247, 218),
)


def spectrogram_png(wave: np.ndarray, rate: int) -> Image.Image:
    """Draw an RGB image of ``WIDTH`` x ``HEIGHT`` pixels.

    ``wave``: float [n] or [n, channels] with n > 0; the power of channels is summed. ``rate``:
    samples per second.
    """
    levels = decibels(wave, rate)
    return Image.fromarray(ramp()[np.rint((levels / RANGE + 1) * 255).astype(int)][::-1])


def decibels(wave: np.ndarray, rate: int) -> np.ndarray:
    """Compute levels relative to the loudest point: float [HEIGHT, WIDTH] in [-RANGE, 0], low
    frequencies first. Silence is -RANGE."""
    power = mel_power(wave, rate)
    return np.clip(10 * np.log10(np.maximum(power, 1e-30) / max(power.max(), QUIET)), -RANGE, 0)


def mel_power(wave: np.ndarray, rate: int) -> np.ndarray:
    """Compute the power in mel bands over time: float [HEIGHT, WIDTH], low frequencies first. A
    full-scale sine is about 1."""
    wave = np.asarray(wave, dtype=np.float64)
    wave = wave[:, None] if wave.ndim == 1 else wave
    size = 2 ** max(4, int(np.ceil(np.log2(rate * WINDOW))))
    step = len(wave) / WIDTH
    # windows per column, so that no sample falls between two columns
    per_column = max(1, int(np.ceil(step / (size / 2))))
    # zeros would look like a click at either end
    padded = np.pad(wave, ((size // 2, size), (0, 0)), "reflect")
    window = np.hanning(size + 1)[:-1]
    bands, power = _bands(size, rate), np.empty((HEIGHT, WIDTH))
    for column in range(WIDTH):  # by columns, so that an hour needs no more memory than a second
        starts = ((column + (np.arange(per_column) + 0.5) / per_column) * step).astype(int)
        # [per_column, size, channels]
        segments = padded[starts[:, None] + np.arange(size)] * window[:, None]
        spectrum = np.fft.rfft(segments, axis=1)
        power[:, column] = bands @ (spectrum.real**2 + spectrum.imag**2).mean(0).sum(-1)
    return power / (window.sum() / 2) ** 2


def ramp() -> np.ndarray:
    """Return 256 colours whose lightness (CIE L*) rises in equal steps: uint8 [256, 3]."""
    anchors = np.array(ANCHORS, dtype=np.float64)
    lightness = _lightness(anchors)
    levels = np.linspace(lightness[0], lightness[-1], 256)
    channels = [np.rint(np.interp(levels, lightness, anchors[:, c])) for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


def _lightness(colours: np.ndarray) -> np.ndarray:
    """Compute CIE L* of sRGB colours [n, 3]: [n]."""
    linear = np.where(colours <= 10.3, colours / 3294.6, ((colours / 255 + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


def _bands(size: int, rate: int) -> np.ndarray:
    """Compute the weights of spectrum bins in rows that are even on the mel scale: [HEIGHT, size /
    2 + 1].

    A row averages the bins that it covers, weighted by their overlap, so narrow rows are never
    empty.
    """
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, HEIGHT + 1) / 2595) - 1) / (rate / size)  # in bins
    bins = np.arange(size // 2 + 1)
    overlap = np.minimum(edges[1:, None], bins + 0.5) - np.maximum(edges[:-1, None], bins - 0.5)
    return np.clip(overlap, 0, None) / np.diff(edges)[:, None]
