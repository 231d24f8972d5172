"""What a frontend keeps of media: originals beside what it decodes of their codes.

No model of codes makes better media than its frontend decodes, so this is measured first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from gen.contracts.modality import Modality
from gen.core.files import put
from gen.media.audio import write_wav
from gen.media.spectrogram import QUIET, mel_power, spectrogram_png
from gen.training.frontends import Encoder

FOLDER, PAIRS, FIGURES = "reconstruction", "pairs.png", "figures.json"
SHOWN = 8  # media that are measured and drawn
HEARD = 4  # sounds that are written
LEAST = 128  # pixels of the longer side of a drawn image
# modality whose frontend can be trained, by that of the media
TRAINED = {n: n for n in ("image", "speech", "video", "motion")} | {"audio": "speech"}
LEAST_PSNR = 24.0  # dB; below it details of photos are gone
MOST_MEL = 8.0  # dB; above it sounds are another sound
MOST_JOINT = 5.0  # cm; above it steps and gestures are others
AUDIBLE = -60.0  # dB below the loudest point
MEASURES = {
    "image": ("PSNR", "dB"),
    "video": ("PSNR", "dB"),
    "audio": ("log-mel distance", "dB"),
    "motion": ("joint error", "cm"),
}


@dataclass(frozen=True)
class Reconstruction:
    """Measured media.

    Attributes:
        kind: ``image``, ``video``, ``audio`` or ``motion``.
        values: of every medium the PSNR or the mean distance of mel levels in dB, or the mean
            distance of joints in cm.
        pairs: originals and what was decoded, as images or waves.
        rate: samples per second of sounds.
    """

    kind: str
    values: list[float]
    pairs: list[tuple[Any, Any]]
    rate: int = 0

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return sum(self.values) / len(self.values)

    @property
    def is_limit(self) -> bool:
        """Whether the frontend loses so much that no model of its codes can look or sound right."""
        most = {"audio": MOST_MEL, "motion": MOST_JOINT}.get(self.kind)
        return self.mean < LEAST_PSNR if most is None else self.mean > most

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "measure": " in ".join(MEASURES[self.kind]),
            "mean": round(self.mean, 3),
            "media": len(self.values),
            "is_limit": self.is_limit,
        }

    def __str__(self) -> str:
        measure, unit = MEASURES[self.kind]
        return f"{measure} {self.mean:.1f} {unit}, {len(self.values)} media"

    def write(self, out: Path) -> Path:
        """Draw originals above what was decoded, and write some sounds. Returns the image."""
        folder = out / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self.kind == "audio":
            for number, pair in enumerate(self.pairs[:HEARD]):
                for name, wave in zip(("original", "decoded"), pair, strict=True):
                    write_wav(folder / f"{number}-{name}.wav", wave, self.rate)
            drawn = [tuple(spectrogram_png(w, self.rate) for w in p) for p in self.pairs]
        else:
            drawn = [tuple(Image.fromarray(array) for array in pair) for pair in self.pairs]
        put(folder / PAIRS, lambda part: sheet(drawn).save(part, format="PNG"))
        return folder / PAIRS


def sheet(pairs: list[tuple[Image.Image, ...]], gap: int = 4) -> Image.Image:
    """Draw pairs of images as columns on white, small ones enlarged."""
    times = max(1, LEAST // max(max(image.size) for pair in pairs for image in pair))
    pairs = [tuple(ImageOps.scale(x, times, Image.Resampling.NEAREST) for x in p) for p in pairs]
    wide = max(image.width for pair in pairs for image in pair)
    high = max(image.height for pair in pairs for image in pair)
    made = Image.new("RGB", (len(pairs) * (wide + gap) - gap, 2 * high + gap), "white")
    for column, pair in enumerate(pairs):
        for row, image in enumerate(pair):
            made.paste(image, (column * (wide + gap), row * (high + gap)))
    return made


def measured_kind(modality: Modality) -> str | None:
    """Return the kind of media as of ``Reconstruction``; None for media that cannot be measured."""
    kind = modality.name if modality.name == "motion" else modality.media_kind
    return kind if kind in MEASURES else None


@torch.no_grad()
def reconstruct(encoder: Encoder, signals: list[Tensor]) -> Reconstruction | None:
    """Encode and decode signals of ``preprocess``, at most ``SHOWN``; None for media that cannot be
    measured."""
    kind = measured_kind(encoder.modality)
    if kind is None or not signals:
        return None
    frontend, values, pairs = encoder.frontend, [], []
    for signal in signals[:SHOWN]:
        back = frontend.decode(frontend.encode(signal[None]))[0]
        was, made = (frontend.postprocess(x) for x in (signal, back))
        if kind == "motion":
            values.append(100 * float(np.linalg.norm(was.joints - made.joints, axis=-1).mean()))
            stills = (encoder.modality.still(motion) for motion in (was, made))
            pairs.append(tuple(np.asarray(still) for still in stills))
            continue
        was, made = np.asarray(was), np.asarray(made)
        if kind == "audio":
            values.append(mel_distance(was, made, frontend.rate))
            pairs.append((was, made))
            continue
        values.append(psnr(was, made))
        middle = len(was) // 2
        pairs.append((was, made) if was.ndim == 3 else (was[middle], made[middle]))
    return Reconstruction(kind, values, pairs, frontend.rate)


def limit_text(modality: str) -> str:
    """Say that a frontend is the limit of all models of its codes, and what helps."""
    said = "the frontend is the limit: no model of its codes makes better media than these. "
    kind = TRAINED.get(modality)
    if kind is None:
        return f"{said}--frontend takes another one"
    return (
        f"{said}More steps, codes or width help, or a frontend of your own media: gen train"
        f" train/frontend data=MEDIA out=F frontend.modality={kind}"
    )


def psnr(x: np.ndarray, y: np.ndarray) -> float:
    """Peak signal-to-noise ratio of pixels uint8 in dB, at most 99."""
    error = float(np.mean((x.astype(np.float64) - y) ** 2))
    return min(99.0, 10 * math.log10(255**2 / max(error, 1e-9)))


def mel_distance(x: np.ndarray, y: np.ndarray, rate: int) -> float:
    """Mean distance of the mel levels of two waves [n] in dB, where one of them is audible."""
    n = min(len(x), len(y))
    powers = np.stack([mel_power(wave[:n], rate) for wave in (x, y)])
    levels = 10 * np.log10(np.maximum(powers, 1e-30) / max(powers.max(), QUIET))
    heard = (levels > AUDIBLE).any(0)
    if not heard.any():
        return 0.0
    clipped = np.maximum(levels, AUDIBLE)[:, heard]
    return float(np.mean(np.abs(clipped[0] - clipped[1])))
