"""Media files as arrays, whatever model made them: images, waves, clips and texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.eval.metric import Unavailable
from gen.media import images
from gen.media.audio import open_sound
from gen.media.resample import resample
from gen.media.video import read_video


def read_image(path: Path) -> Tensor:
    """Read an image as uint8 [3, H, W]. Raises ``GenError``."""
    return torch.from_numpy(np.array(images.read_image(path))).permute(2, 0, 1).contiguous()


def read_wave(path: Path, rate: int | None = None) -> tuple[np.ndarray, int]:
    """Read a sound file as one channel.

    Args:
        path: sound file.
        rate: samples per second to resample to; None keeps the file's.

    Returns:
        Float32 [n], and its samples per second.

    Raises:
        GenError: unreadable file.
        Unavailable: another rate, where no package resamples.
    """
    wave, found = open_sound(path)
    mono = wave.mean(1, dtype=np.float64).astype(np.float32)
    if rate is None or rate == found:
        return mono, found
    try:
        return resample(mono[:, None], found, rate)[:, 0], rate
    except GenError as error:
        raise Unavailable(
            f"sound {path} has {found} samples per second; expected {rate}. {error}"
        ) from None


def read_clip(path: Path) -> Tensor:
    """Read a video as uint8 [F, 3, H, W]. Raises ``GenError``."""
    return torch.from_numpy(read_video(path)).permute(0, 3, 1, 2).contiguous()


def read_text(path: Path) -> str:
    """Read a text without surrounding white space. Raises ``GenError``."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GenError(f"the text {path} cannot be read: {error}") from None


def text_of(row: Mapping[str, Any], field: str) -> str | None:
    """Return the text that an item is compared with.

    Args:
        row: row of the manifest.
        field: ``prompt``, or a key of the row's ``meta``.

    Returns:
        The text; None if the row has no such key.
    """
    if field == "prompt":
        return row["prompt"]
    found = (row.get("meta") or {}).get(field)
    return None if found is None else str(found)
