"""Checker of clips of moving shapes, which reads the pixels of the frames alone.

The renderer's family is small and known, so reading a clip is a search without a trained judge:

1. The background stands still and is linear, so a robust linear fit finds it. Every pixel lies
between the background and some palette colour; its fraction of the way is a coverage in [0, 1].
Blur, noise and antialiasing change coverages a little instead of flipping labels. The colour that
explains most pixels is the shape's, and its centroid in every frame is the shape's position.
2. The coverages of all frames together are compared with every shape and radius that the renderer's
own ``coverage`` draws at these centroids, sharp or blurred. The score is the Jaccard index for
real-valued masks, ``ab / (aa + bb - ab)``.
3. The centres are compared with every path of the renderer: four directions, two speeds, no turn or
a turn at the wall ahead at any time. Only time order separates right from left, so shuffled frames
do not pass, nor do reversed ones unless they show the same: a clip that bounces does so from both
ends.

A clip is invalid if two frames or more do not show exactly one clean shape, or if its centres
follow no known path. An invalid clip never passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from gen.contracts.modality import Verdict
from gen.modalities.video import captions as moving
from gen.modalities.video.captions import DIRECTIONS, FRAMES, PALETTE, SHAPES, SPEEDS, Caption

MIN_IOU = 0.8  # a region with less overlap is no shape
MIN_FRAME_IOU = 0.6  # the same for one frame
# margin by which another shape or radius may explain one frame better than the one that explains
# all together best
MAX_CHANGE = 0.12
MIN_FRAMES = FRAMES - 1  # clean frames; one may fail
# pixels, root mean square, between the centres and the best path; a shape that stands still is 1.1
# off
MAX_RESIDUAL = 0.75
# pixels of a frame that neither background nor shape explains; the smallest shape that is ever
# drawn covers 29
MAX_STRAY = 6
STRONG = 40.0  # RGB distance from the background of a foreground pixel
STRAY_DISTANCE = 60.0  # the same for a pixel that counts as stray
# of a frame's median shape pixel to the line from background to colour: orange is neither red nor
# yellow
PURE_DISTANCE = 52.0
BACK_DISTANCE = 45.0  # of the mean background to the mean of the renderer's, in any channel
SIZE_BORDER = sum(moving.RADII.values()) / 2
SLACK = 1.25  # tolerance in pixels around the drawn radii
_HALF, _PHASES = 11, 4  # the search window is 23 pixels wide; centres to a quarter of a pixel
_SHADES = np.array(list(PALETTE.values()), np.float32)


@dataclass(frozen=True)
class MovingShape:
    """Coloured object that moves in a clip, with the shape and the path that explain it best."""

    colour: str
    shape: str
    size: str
    direction: str
    speed: str
    bounces: bool
    radius: float  # pixels
    iou: float
    residual: float  # pixels, root mean square
    clean: int  # frames that show this shape and no other object
    centres: np.ndarray  # x, y in pixels, in the clean frames: float32 [clean, 2]

    @property
    def caption(self) -> Caption:
        """Full caption of the object."""
        return Caption(self.shape, self.direction, self.colour, self.size, self.speed, self.bounces)


def check(clip: object, caption: Caption | str) -> Verdict:
    """Judge one clip (uint8 [16, 32, 32, 3] or a list of PIL images) against a caption. Omitted
    attributes match anything.
    """
    parsed = moving.parse(caption) if isinstance(caption, str) else caption
    frames, expected = _pixels(clip), (FRAMES, moving.SIZE, moving.SIZE, 3)
    if frames.shape != expected or frames.dtype != np.uint8:
        return Verdict(
            False,
            False,
            f"the clip is {frames.dtype} {list(frames.shape)}; expected uint8 {list(expected)}",
        )
    moving_shape = track(frames)
    fault = _fault(moving_shape)
    if moving_shape is None or fault:
        return Verdict(False, False, fault)
    if _agrees(parsed, moving_shape.caption):
        return Verdict(True, True, f"saw {moving_shape.caption}")
    return Verdict(False, True, f"saw {moving_shape.caption}; expected {parsed}")


def grade(clip: object, caption: Caption | str) -> float:
    """Return the share of a caption that a clip (uint8 [16, 32, 32, 3]) shows.

    The shape counts as one thing to show, and so does every attribute that the caption states. An
    invalid clip has one thing more that it does not show; one without a shape has 0.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    parsed = moving.parse(caption) if isinstance(caption, str) else caption
    frames = _pixels(clip)
    if frames.shape != (FRAMES, moving.SIZE, moving.SIZE, 3) or frames.dtype != np.uint8:
        return 0.0
    found = track(frames)
    if found is None:
        return 0.0
    said, seen = vars(parsed).values(), vars(found.caption).values()
    matches = [want == got for want, got in zip(said, seen, strict=True) if want is not None]
    return (1 + sum(matches)) / (1 + len(matches) + bool(_fault(found)))


def check_many(
    clips: Sequence[object] | np.ndarray, captions: Sequence[Caption | str]
) -> list[Verdict]:
    """Judge clips one by one.

    Raises:
        ValueError: the numbers of clips and captions differ.
    """
    if len(clips) != len(captions):
        raise ValueError(
            f"{len(clips)} clips and {len(captions)} captions; expected one caption per clip"
        )
    return [check(clip, caption) for clip, caption in zip(clips, captions, strict=True)]


def track(clip: np.ndarray) -> MovingShape | None:
    """Find the moving object of a clip (uint8 [16, 32, 32, 3]), clean or not; None without a
    coloured object.
    """
    seen = _segment(np.asarray(clip, np.float32))
    if seen is None:
        return None
    colour, masks, strays = seen
    there = masks.any((1, 2))
    shape, radius, iou, alike, centres = _fit_shape(masks[there])
    clean = alike & (strays[there] <= MAX_STRAY)
    kept = int(clean.sum())
    if not kept:
        clean[:] = True  # only so that there is a path to report
    size = "small" if radius < SIZE_BORDER else "large"
    times, centres = np.flatnonzero(there)[clean], centres[clean]
    residual, direction, speed, bounces = _fit_path(times, centres, shape, size)
    return MovingShape(
        colour, shape, size, direction, speed, bounces, radius, iou, residual, kept, centres
    )


def _fault(found: MovingShape | None) -> str:
    """Reason why a clip is invalid, or an empty text."""
    if found is None:
        return "no coloured shape on a muted background"
    nearest = f"nearest: {found.shape}, radius {found.radius:.1f}, overlap {found.iou:.2f}"
    radii = moving.RADII.values()
    if found.iou < MIN_IOU or not min(radii) - SLACK <= found.radius <= max(radii) + SLACK:
        return f"the {found.colour} region is not a clean shape ({nearest})"
    if found.clean < MIN_FRAMES:
        return (
            f"{FRAMES - found.clean} of {FRAMES} frames do not show exactly one {found.colour}"
            f" {found.shape}"
        )
    if found.residual > MAX_RESIDUAL:
        return (
            f"the {found.colour} {found.shape} follows no known path (nearest: {found.caption},"
            f" {found.residual:.1f} pixels off)"
        )
    return ""


def _agrees(said: Caption, seen: Caption) -> bool:
    return all(
        want is None or want == got
        for want, got in zip(vars(said).values(), vars(seen).values(), strict=True)
    )


def _pixels(clip: object) -> np.ndarray:
    if isinstance(clip, (list, tuple)):
        frames = [np.asarray(f.convert("RGB") if isinstance(f, Image.Image) else f) for f in clip]
        if len({f.shape for f in frames}) != 1:
            return np.empty(len(frames), object)  # none, or of several sizes
        return np.stack(frames)
    return np.asarray(clip)


# --- Segmenting


@functools.cache
def _plane() -> np.ndarray:
    """Columns 1, x and y of every pixel: float32 [1024, 3]."""
    u = np.linspace(-1, 1, moving.SIZE, dtype=np.float32)
    y, x = np.meshgrid(u, u, indexing="ij")
    return np.stack([np.ones(x.size, np.float32), x.ravel(), y.ravel()], -1)


def _ground(p: np.ndarray) -> np.ndarray:
    """Linear background of a clip [16, 1024, 3]: [1024, 3]. Pixels far from the fit are ignored."""
    still, plane = np.median(p, 0), _plane()
    back = np.median(still, 0) + np.zeros_like(still)
    for reach in (60, 45, 30, 30):
        near = (np.linalg.norm(still - back, axis=-1) < reach)[:, None] * plane
        back = plane @ np.linalg.solve(
            near.T @ plane + 1e-3 * np.eye(3, dtype=np.float32), near.T @ still
        )
    return back


def _around(a: np.ndarray) -> np.ndarray:
    """Sum over the 3x3 pixels around each pixel: [T, 32, 32] -> [T, 32, 32]."""
    a = np.pad(a.astype(np.float32), ((0, 0), (1, 1), (1, 1)))
    a = a[:, :-2] + a[:, 1:-1] + a[:, 2:]
    return a[:, :, :-2] + a[:, :, 1:-1] + a[:, :, 2:]


def _segment(p: np.ndarray) -> tuple[str, np.ndarray, np.ndarray] | None:
    """Colour of the shape, its coverage [16, 32, 32] and the number of stray pixels of every frame
    [16]. A shape of unknown colour is stray.
    """
    size = p.shape[:-1]
    p = p.reshape(len(p), -1, 3)
    back = _ground(p)
    if (abs(back.mean(0) - np.mean(moving.GROUNDS, 0)) > BACK_DISTANCE).any():
        return None
    # [3, 16, 1024]: sums over three channels are faster this way
    off = np.ascontiguousarray(np.moveaxis(p - back, -1, 0))
    far = (off**2).sum(0)  # squared distance to the background
    span = np.moveaxis(_SHADES[:, None] - back, -1, 1)[:, :, None]  # [6, 3, 1, 1024]
    along = np.stack([off[0] * r + off[1] * g + off[2] * b for r, g, b in span])  # [6, 16, 1024]
    length = (span**2).sum(1)
    share = np.clip(along / length, 0, 1.15)
    # squared distance to the line from background to colour
    rest = far - 2 * share * along + share**2 * length
    nearest = rest.argmin(0)
    strong = (far > STRONG**2).reshape(size)
    strong &= _around(strong) > 2.5  # drops single noisy pixels
    score = [
        (share[k] * (nearest == k))[strong.reshape(far.shape)].sum() for k in range(len(PALETTE))
    ]
    k = int(np.argmax(score))

    def grid(a):
        return a.reshape(size)

    core = strong & grid((nearest == k) & (share[k] > 0.35))
    if not core.any():
        return None
    region = _around(core) > 0.5
    stray = strong & grid(far > STRAY_DISTANCE**2) & (_around(region) == 0)
    stray &= _around(stray) > 2.5
    odd = [
        np.median(r[c]) > PURE_DISTANCE**2 if c.any() else False
        for r, c in zip(grid(rest[k]), core, strict=True)
    ]
    strays = stray.sum((1, 2)) + np.where(odd, core.sum((1, 2)), 0)
    masks = np.minimum(grid(share[k]), 1) * region
    return list(PALETTE)[k], masks, strays


# --- Fitting shapes and paths


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray, list[tuple[str, float]], np.ndarray]:
    """Templates [4 * 4, n, 23 * 23] by the y and x phase of their centroid, their squared norms [4
    * 4, n], the (shape, radius) of each of the n, and the way from its centroid to its centre (x,
    y) in pixels [n, 2].
    """
    middle, width = moving.SIZE // 2, 2 * _HALF + 1
    window = slice(middle - _HALF, middle + _HALF + 1)
    radii = np.arange(3, 8.75, 0.5, dtype=np.float32)
    phases = np.arange(_PHASES) / _PHASES
    pixels = np.arange(moving.SIZE)
    kinds, shifts, templates = [], [], []
    for shape in SHAPES:
        for r in radii:
            c = moving.coverage(shape, r, np.array([middle]), np.array([middle]))[0]
            shift = middle - np.array([(c.sum(axis) * pixels).sum() / c.sum() for axis in (0, 1)])
            y, x = (v.ravel() for v in np.meshgrid(middle + phases, middle + phases, indexing="ij"))
            drawn = moving.coverage(shape, r, x + shift[0], y + shift[1])
            for kernel in (1.0, 0.5):  # as drawn, and blurred by a quarter, a half and a quarter
                for axis in (1, 2):
                    drawn = kernel * drawn + (1 - kernel) / 2 * (
                        np.roll(drawn, 1, axis) + np.roll(drawn, -1, axis)
                    )
                templates.append(drawn[:, window, window].reshape(len(x), width**2))
                kinds.append((shape, float(r)))
                shifts.append(shift)
    bank = np.stack(templates, 1)
    return bank, (bank**2).sum(-1), kinds, np.array(shifts, np.float32)


def _fit_shape(masks: np.ndarray) -> tuple[str, float, float, np.ndarray, np.ndarray]:
    """Shape, radius and overlap that explain all frames [T, 32, 32] together best; whether they
    explain each frame [T], and the centres [T, 2].
    """
    bank, norms, kinds, shifts = _bank()
    total, pixels = masks.sum((1, 2)), np.arange(moving.SIZE, dtype=np.float32)
    middle = np.stack([(masks.sum(axis) * pixels).sum(-1) / total for axis in (1, 2)], -1)  # x, y
    quarters = np.round(middle * _PHASES).astype(int)
    x, y = (quarters // _PHASES).T
    phase = (quarters % _PHASES) @ np.array([1, _PHASES])
    padded = np.pad(masks, ((0, 0), (_HALF, _HALF), (_HALF, _HALF)))
    width = 2 * _HALF + 1
    windows = np.stack(
        [m[b : b + width, a : a + width].ravel() for m, a, b in zip(padded, x, y, strict=True)]
    )
    product = np.stack([bank[f] @ w for f, w in zip(phase, windows, strict=True)])  # [T, n]
    # of the whole image: far parts count too
    union = (masks**2).sum((1, 2))[:, None] + norms[phase] - product
    overlap = product.sum(0) / union.sum(0)
    best = int(overlap.argmax())
    shape, radius = kinds[best]
    each = product / union
    alike = (each[:, best] >= MIN_FRAME_IOU) & (each[:, best] >= each.max(1) - MAX_CHANGE)
    return shape, radius, float(overlap[best]), alike, middle + shifts[best]


@functools.cache
def _paths(shape: str, size: str) -> tuple[np.ndarray, np.ndarray, list[tuple[str, str, bool]]]:
    """All paths of a shape [n, 16, 2], whether each may lie anywhere along x and y [n, 1, 2], and
    its meaning. A path that turns is tied to its wall.
    """
    wall, paths, free, kinds = moving.walls(shape, size), [], [], []
    for direction in DIRECTIONS:
        for speed in SPEEDS:
            step, pace = np.array(moving.STEPS[direction]), moving.PACES[speed]
            for turn in (
                None,
                *np.arange(moving.TURN - 3.5, moving.TURN + 2.75, 0.25),
            ):  # somewhere in the middle of the clip
                start = (
                    0 * step if turn is None else abs(step) * wall[direction] - step * pace * turn
                )
                paths.append(
                    moving.trajectory(
                        Caption(shape, direction, None, size, speed, turn is not None), tuple(start)
                    )
                )
                free.append((step == 0) | (turn is None))
                kinds.append((direction, speed, turn is not None))
    return np.stack(paths), np.stack(free)[:, None], kinds


def _fit_path(
    times: np.ndarray, centres: np.ndarray, shape: str, size: str
) -> tuple[float, str, str, bool]:
    """Path nearest to the centres [n, 2] seen at ``times`` [n]: the root mean square distance in
    pixels, and its meaning.
    """
    paths, free, kinds = _paths(shape, size)
    apart = centres - paths[:, times]
    apart -= np.where(free, apart.mean(1, keepdims=True), 0)
    square = (apart**2).sum(-1).mean(-1)
    best = int(square.argmin())
    return (float(square[best] ** 0.5), *kinds[best])
