"""A modality whose condition is media: the gripper starts where an image is bright. Not a test."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from gen.contracts.condition import Condition
from gen.modalities.action.modality import ActionModality, Situation
from gen.modalities.action.tasks import Task

SIZE = (6, 4)


@dataclass(frozen=True, eq=False)
class Seen(Situation):
    """Situation of media, by whose content its random numbers are drawn."""

    digests: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()} | {self.digests}"


class SeeingModality(ActionModality):
    """Actions from a text, an observation, or one image and any sounds and clips."""

    accepts = frozenset({"text", "observation", "images", "audio", "video"})
    most = {"images": 1}

    def parse(self, condition: Condition):
        if not set(condition.parts) & {"images", "audio", "video"}:
            return super().parse(condition)
        condition.require(self.accepts, "modality 'seeing'", self.most)
        media = [
            *condition.media("images", SIZE),
            *condition.media("audio"),
            *condition.media("video"),
        ]
        bright = float(np.mean([m.array.mean() / 255 for m in media if m.kind != "audio"] or [0]))
        state = np.array([0.2 + 0.1 * bright, 0.3, 0.6, 0.5, 0, 0, 0], np.float32)
        return Seen(Task("reach"), state, " ".join(map(str, media)))


def image(shade: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """A grey image of a size (h, w)."""
    return Image.fromarray(np.full((*size, 3), shade, np.uint8))


def png(shade: int, size: tuple[int, int] = SIZE) -> bytes:
    """The bytes of its file."""
    out = BytesIO()
    image(shade, size).save(out, format="PNG")
    return out.getvalue()
