"""Rewards of motions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gen.contracts.scorer import Scorer
from gen.core.params import number
from gen.core.registry import register
from gen.media.motion.skeleton import FPS, Motion, joint

FEET = ("left_foot", "right_foot")


@register("scorer", "foot_skate")
@dataclass(frozen=True)
class FootSkate(Scorer):
    """Negated sliding of the feet: horizontal speed of a foot while it is near the floor.

    ``height``: metres above the lowest foot of the clip within which a foot is near the floor.
    """

    height: float = number(0.05, most=1.0)

    modalities: ClassVar[tuple[str, ...]] = ("motion",)
    about: ClassVar[str] = (
        "minus the mean sliding of feet on the floor, metres per second; at most 0"
    )

    def score(self, samples):
        return [-sliding(s.media, self.height) for s in samples]


def sliding(motion: Any, height: float) -> float:
    """Return the mean horizontal speed of feet near the floor, in metres per second.

    Args:
        motion: joint positions in metres, float [T, 22, 3], or a ``Motion``.
        height: metres above the lowest foot within which a foot is near the floor.
    """
    joints = np.asarray(motion.joints if isinstance(motion, Motion) else motion, np.float64)
    feet = joints[:, [joint(name) for name in FEET]]
    if len(feet) < 2:
        return 0.0
    low = feet[..., 1] < feet[..., 1].min() + height
    stands = low[1:] & low[:-1]
    speed = np.linalg.norm(np.diff(feet[..., [0, 2]], axis=0), axis=-1) * FPS
    return float(speed[stands].mean()) if stands.any() else 0.0
