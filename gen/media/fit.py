"""Sizes of media: what is as large or as long as the model's media, and how other media are made
so. Nothing is stretched: images and clips keep their aspect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from gen.core.errors import GenError
from gen.media.motion.skeleton import Motion

CROP, PAD, BUCKET = "crop", "pad", "bucket"
FITS = (CROP, PAD, BUCKET)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)  # around padded images, and clips
LEAST_REST = 0.5  # share of a window that the rest behind the last whole one must fill


@dataclass(frozen=True)
class Size:
    """Size that media must have.

    Attributes:
        axes: samples of a signal along each axis of its code grid: (h, w), (frames, h, w), (n,);
            empty where the frontend alone decides.
        shortest: least number along the first axis, where lengths differ; else 0.
        resize: how images and clips of another size are made this one: ``crop`` scales them to
            cover it and cuts their edges, ``pad`` scales them to lie inside. ``bucket`` is ``crop``
            at a size that was chosen for the folder. What has a length is cut into windows. Empty:
            other sizes are refused.
    """

    axes: tuple[int, ...] = ()
    shortest: int = 0
    resize: str = ""

    def fit(self, media: Any, name: str) -> list[Any]:
        """Return media of this size: one, or the windows of what is longer.

        Raises:
            GenError: media of another size that may not be resized.
        """
        if not self.axes:
            return [media]
        if isinstance(media, Image.Image):
            return [self._image(media, name)]
        if isinstance(media, Motion):
            return self._motions(media, name)
        array = np.asarray(media)
        if array.shape[: len(self.axes)] == self.axes:
            return [array]
        if not self.resize:
            raise self._misfit(name, array.shape[: len(self.axes)])
        parts = [array[a:b] for a, b in self.windows(len(array))]
        if len(self.axes) > 1 and array.shape[1:3] != self.axes[1:]:
            parts = [np.stack([self._frame(f) for f in part]) for part in parts]
        return [self._filled(part) for part in parts]

    def windows(self, length: int) -> list[tuple[int, int]]:
        """Cut a length into windows of the first axis, each behind the other. The rest behind the
        last whole one is a window if it fills half of one, or if it is all there is."""
        first = self.axes[0]
        least = self.shortest or int(first * LEAST_REST)
        starts = range(0, max(1, length), first)
        ends = [(a, min(a + first, length)) for a in starts]
        return [(a, b) for a, b in ends if a == 0 or b - a >= least]

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of an image that is scaled to cover this size, or to lie inside
        it."""
        h, w = self.axes[-2:]
        pick = min if self.resize == PAD else max
        scale = pick(w / width, h / height)
        sides = round(width * scale), round(height * scale)
        if self.resize == PAD:
            return min(max(1, sides[0]), w), min(max(1, sides[1]), h)
        return max(sides[0], w), max(sides[1], h)

    def _framed(self, image: Image.Image, ground: tuple[int, int, int]) -> Image.Image:
        """Scale an RGB image and cut its edges, or lay it on a ground."""
        (h, w), (width, height) = self.axes[-2:], self.scaled(*image.size)
        left, top = (width - w) // 2, (height - h) // 2
        if self.resize == PAD:
            made = Image.new("RGB", (w, h), ground)
            made.paste(image.resize((width, height), Image.Resampling.BICUBIC), (-left, -top))
            return made
        # the part of the original that is kept, so that no larger image is ever made
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + w) * x, (top + h) * y)
        return image.resize((w, h), Image.Resampling.BICUBIC, box=box)

    def _frame(self, frame: np.ndarray) -> np.ndarray:
        return np.asarray(self._framed(Image.fromarray(frame), BLACK))

    def _filled(self, part: np.ndarray) -> np.ndarray:
        """Put silence behind a sound, and the last frame behind a clip."""
        short = self.axes[0] - len(part)
        if short <= 0:
            return part
        rest = np.zeros(short, part.dtype) if part.ndim == 1 else part[-1:].repeat(short, 0)
        return np.concatenate([part, rest])

    def _image(self, image: Image.Image, name: str) -> Image.Image:
        if image.size[::-1] == self.axes:
            return image
        if not self.resize:
            raise self._misfit(name, image.size[::-1])
        return self._framed(image, WHITE)

    def _motions(self, motion: Motion, name: str) -> list[Motion]:
        most = self.axes[0]
        if motion.frames < self.shortest or (motion.frames > most + 1 and not self.resize):
            raise GenError(
                f"{name} has {motion.frames} poses; expected {self.shortest} to {most}"
                + " (--resize cuts longer ones)" * (motion.frames > most)
            )
        if motion.frames <= most + 1:
            return [motion.cut(0, min(most, motion.frames))]
        return [motion.cut(a, b) for a, b in self.windows(motion.frames)]

    def _misfit(self, name: str, came: tuple[int, ...]) -> GenError:
        def spelled(axes: tuple[int, ...]) -> str:
            return "x".join(map(str, axes)) + (" samples" if len(axes) == 1 else "")

        of = ", frames at the model's rate x height x width" if len(self.axes) == 3 else ""
        return GenError(
            f"{name} has {spelled(came)}; expected {spelled(self.axes)}{of} (--resize makes it so,"
            " --size states another)"
        )


def bucket(sizes: list[tuple[int, int]], axes: tuple[int, int], step: tuple[int, int]) -> Any:
    """Choose a size of about the same area for the images of a folder: that whose crop loses the
    smallest share of their pixels.

    Args:
        sizes: widths and heights.
        axes: height and width of the usual size.
        step: rows and columns of a code.

    Returns:
        Height and width, whole codes.
    """
    area, found = axes[0] * axes[1], [axes]
    for height in range(step[0], 4 * axes[0] + 1, step[0]):
        width = max(1, round(area / height / step[1])) * step[1]
        if abs(height * width / area - 1) < 0.15:
            found.append((height, width))
    many = np.array(sizes, float).reshape(-1, 2)

    def lost(size: tuple[int, int]) -> float:
        ratio = (many[:, 0] / many[:, 1]) / (size[1] / size[0])
        return float(np.mean(1 - np.minimum(ratio, 1 / ratio)))

    return min(found, key=lost) if len(many) else axes
