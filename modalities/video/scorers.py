"""Rewards of clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gen.contracts.scorer import Scorer
from gen.core.registry import register
from gen.modalities.video.checker import track


@register("scorer", "travel")
@dataclass(frozen=True)
class Travel(Scorer):
    """Way of the moving shape through a clip, in pixels; 0 without a shape."""

    modalities: ClassVar[tuple[str, ...]] = ("video",)
    about: ClassVar[str] = "way of the moving shape in pixels; at least 0"

    def score(self, samples):
        return [way(s.media) for s in samples]


def way(clip: np.ndarray) -> float:
    """Return the length of the way of a clip's shape (uint8 [16, 32, 32, 3]) in pixels."""
    found = track(np.asarray(clip))
    if found is None:
        return 0.0
    return float(np.linalg.norm(np.diff(found.centres, axis=0), axis=-1).sum())
