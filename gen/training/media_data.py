"""Media of a folder as signals: what a frontend is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError, describe
from gen.core.files import sha256
from gen.core.tables import plural
from gen.media.fit import CROP, Size
from gen.media.motion.features import features
from gen.media.motion.skeleton import Motion
from gen.training.encode import spelled_reasons
from gen.training.frontends import Encoder, load_encoder, size_of
from gen.training.shards import fingerprint
from gen.training.sources import find_sources, read_source

LEVELS = 2**15 - 1  # of a sample of sound, which is kept in 16 bits
WINDOW = 64  # poses of a motion that are trained on together


@dataclass(frozen=True)
class MediaData:
    """Media of one size.

    Attributes:
        folder: folder of the media.
        encoder: the modality with its own frontend, which says how media are read.
        size: size of the media.
        signals: images uint8 [N, h, w, 3], clips uint8 [N, F, h, w, 3], sounds int16 [N, n], or
            features of motions float [N, WINDOW, 263].
        mark: digest of the files: other media have another one.
        skipped: files that were left out, with the reason.
    """

    folder: Path
    encoder: Encoder
    size: Size
    signals: Tensor
    mark: str
    skipped: dict[str, str]

    def batch(self, rows: Tensor) -> Tensor:
        """Return signals in [-1, 1]: images float [B, 3, h, w], clips float [B, F, 3, h, w], sounds
        float [B, 1, n]; of motions the features as they are."""
        some = self.signals[rows].float()
        if self.encoder.modality.media_kind in ("image", "video"):
            return some.movedim(-1, -3) / 127.5 - 1
        return some[:, None] / LEVELS if self.encoder.modality.media_kind == "audio" else some


def load_media(
    folder: str | Path, modality: str, size: str = "", say: Callable[[str], None] = print
) -> MediaData:
    """Read the media of a folder at one size; what cannot be read is left out and named.

    Args:
        folder: the media.
        modality: ``image``, ``speech``, ``video`` or ``motion``.
        size: size of the media; empty for that of the modality's own models.
        say: receives what is left out.

    Raises:
        GenError: no media, or none that can be read.
    """
    encoder = load_encoder(modality)
    shape = size_of(encoder, size or None, CROP)
    sources, signals, skipped = find_sources(folder, modality).sources, [], {}
    for source in sources:
        try:
            for medium in read_source(source, encoder.modality, 0, True, encoder.frontend.rate):
                fitted = shape.fit(medium.media, source.name)
                signals += [kept for part in fitted for kept in _kept(part)]
        except Exception as error:  # what a decoder of files raises is open
            skipped[source.name] = describe(error)
    if skipped:
        count = plural(len(skipped), "file")
        say(f"left out {count}: {spelled_reasons(skipped, 10)}")
    if not signals:
        raise GenError(f"none of the {plural(len(sources), 'file')} of {folder} can be read")
    files = {s.name: sha256(s.path) for s in sources}
    mark = fingerprint({"files": files, "size": list(shape.axes)})
    return MediaData(Path(folder), encoder, shape, torch.stack(signals), mark, skipped)


def _kept(media: Any) -> list[Tensor]:
    """Return media as signals: one, or the windows of a motion, the last pose of a short one
    repeated."""
    if isinstance(media, Motion):
        rows = torch.from_numpy(features(media))
        parts = rows.split(WINDOW)
        kept = [part for i, part in enumerate(parts) if not i or 2 * len(part) >= WINDOW]
        return [torch.cat([p, p[-1:].expand(WINDOW - len(p), -1)]) for p in kept]
    array = np.array(media)
    if array.dtype == np.uint8:
        return [torch.from_numpy(array)]
    return [torch.from_numpy(np.rint(np.clip(array, -1, 1) * LEVELS).astype(np.int16))]
