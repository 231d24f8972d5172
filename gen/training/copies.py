"""Copies of media that are shifted a little: a model that is trained on few media otherwise learns
their codes by heart, and obeys no caption that it has not seen.

An image is moved by up to a twentieth of its sides, and its edges are repeated. A sound begins up
to a twentieth of its length later or earlier, in silence. Nothing is mirrored or coloured, so that
captions stay true.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import bad_value

MOST = 20  # the largest shift is the side divided by this
SHIFTED = ("image", "speech", "audio")  # modalities whose media can be shifted


def require_shiftable(modality: str, copies: int) -> None:
    """Raise ``GenError`` for copies of media that cannot be shifted."""
    if copies > 1 and modality not in SHIFTED:
        raise bad_value("copies", copies, f"1 for modality {modality!r}")


def shifted_copies(signal: Tensor, copies: int, name: str) -> list[Tensor]:
    """Return a signal and its shifted copies.

    Args:
        signal: image float [C, h, w], or sound float [..., n].
        copies: number of signals.
        name: name of the medium, which decides the shifts.
    """
    axes = 2 if signal.ndim == 3 else 1
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    made = [signal]
    for _ in range(copies - 1):
        most = [n // MOST for n in signal.shape[-axes:]]
        shifts = [int(rng.integers(-m, m + 1)) for m in most]
        made.append(shifted(signal, shifts))
    return made


def shifted(signal: Tensor, shifts: list[int]) -> Tensor:
    """Return a signal moved along its last axes; arguments of ``shifted_copies``."""
    pads = [pad for shift in reversed(shifts) for pad in (max(0, shift), max(0, -shift))]
    mode = "replicate" if len(shifts) == 2 else "constant"
    padded = F.pad(signal[None], pads, mode=mode)[0]
    for axis, shift in enumerate(shifts, signal.ndim - len(shifts)):
        padded = padded.narrow(axis, max(0, -shift), signal.shape[axis])
    return padded
