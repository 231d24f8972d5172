"""Checker of images of captioned shapes, which reads the pixels alone.

The renderer's family is small and known, so reading an image is a search without a trained judge:

1. Pixels near a palette colour (at any of its shades) are that colour's core. The other pixels give
the local background. Between the two, each pixel near a core gets a coverage in [0, 1], so blur,
noise and antialiasing change coverages a little instead of flipping labels.
2. Two shapes never share a colour, so each colour's coverage must be one shape. It is compared with
every shape, radius and centre that the renderer's own ``coverage`` can draw near its centroid. The
score is the Jaccard index for real-valued masks, ``ab / (aa + bb - ab)``, which is 1 only for equal
masks and needs one product per template.

An image is invalid if no template explains a region, or no palette colour explains a large strongly
coloured area. An invalid image never passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from PIL import Image

from gen.contracts.modality import Verdict
from gen.modalities.image import captions as shapes
from gen.modalities.image.captions import Caption, Item

MIN_IOU = 0.85  # a region with less overlap is no shape
# pixels; a smaller region is a speck. The smallest shape that is ever drawn covers 79
MIN_CORE = 24
MAX_STRAY = 40  # pixels unlike background and palette; more of them are an unknown object
CORE_DISTANCE = 60.0  # RGB distance of a pixel to the nearest shade of a colour
PURE_DISTANCE = 40.0  # the same for the median pixel of a region: orange is neither red nor yellow
STRAY_DISTANCE = 75.0  # RGB distance to the local background
SIZE_BORDER = (shapes.RADII["small"][1] + shapes.RADII["large"][0]) / 2
# tolerance in pixels around the drawn radii; a fragment of a triangle is a triangle, but too small
SLACK = 0.75
# the search window is 38 pixels wide; centres are up to 4 pixels from the centroid
_HALF, _REACH = 19, 4


@dataclass(frozen=True)
class Region:
    """Coloured region and the shape that explains it best.

    Attributes:
        centre: x and y in pixels.
        iou: Jaccard index of its coverage and that of the shape.
    """

    colour: str
    shape: str
    size: str
    location: str
    radius: float
    centre: tuple[float, float]
    iou: float

    @property
    def item(self) -> Item:
        """Item of a full caption of the region."""
        return Item(self.shape, self.colour, self.size, self.location)


def check(image: object, caption: Caption | str) -> Verdict:
    """Judge one image (uint8 [64, 64, 3] or a PIL image) against a caption."""
    return check_many([image], [caption])[0]


def check_many(
    images: Sequence[object] | np.ndarray, captions: Sequence[Caption | str]
) -> list[Verdict]:
    """Judge images one by one. Omitted attributes match anything; further shapes never do.

    Raises:
        ValueError: the numbers of images and captions differ.
    """
    if len(images) != len(captions):
        raise ValueError(
            f"{len(images)} images and {len(captions)} captions; expected one caption per image"
        )
    parsed = [shapes.parse(c) if isinstance(c, str) else c for c in captions]
    return [
        _judge(regions, stray, c) for (regions, stray), c in zip(_read(images), parsed, strict=True)
    ]


def grade(image: object, caption: Caption | str) -> float:
    """Return the share of a caption that an image (uint8 [64, 64, 3] or a PIL image) shows.

    Every shape counts as one thing to show, and so does every attribute that the caption states. A
    further shape, or an image that is invalid, counts as one thing that is not shown.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    parsed = shapes.parse(caption) if isinstance(caption, str) else caption
    regions, stray = _read([image])[0]
    asked = [[v for v in vars(item).values() if v is not None] for item in parsed.items]
    padded: list[Region | None] = [*regions, *[None] * (len(asked) - len(regions))]
    found = max(
        sum(
            1 + sum(v in vars(region.item).values() for v in values)
            for values, region in zip(asked, order, strict=True)
            if region is not None
        )
        for order in permutations(padded, len(asked))
    )
    things = sum(1 + len(values) for values in asked)
    amiss = max(0, len(regions) - len(asked)) + (not _judge(regions, stray, parsed).valid)
    return found / (things + amiss)


def detect(image: object) -> list[Region]:
    """Coloured regions of an image in palette order, whether or not they are clean shapes (see
    ``iou``).
    """
    return _read([image])[0][0]


def _judge(regions: list[Region], stray: int, caption: Caption) -> Verdict:
    least, most = shapes.RADII["small"][0] - SLACK, shapes.RADII["large"][1] + SLACK
    unclear = [f for f in regions if f.iou < MIN_IOU or not least <= f.radius <= most]
    valid = not unclear and stray <= MAX_STRAY
    seen = " and ".join(f.item.phrase() for f in regions) or "no shape"
    if unclear:
        f = unclear[0]
        nearest = f"nearest: {f.shape}, radius {f.radius:.1f}, overlap {f.iou:.2f}"
        return Verdict(False, False, f"the {f.colour} region is not a clean shape ({nearest})")
    if not valid:
        return Verdict(
            False,
            False,
            f"{stray} pixels have neither a shape's colour nor the background's; saw {seen}",
        )
    if len(regions) == len(caption.items) and any(
        all(_agrees(i, f) for i, f in zip(caption.items, order, strict=True))
        for order in permutations(regions)
    ):
        return Verdict(True, True, f"saw {seen}")
    return Verdict(False, True, f"saw {seen}; expected {caption}")


def _agrees(item: Item, region: Region) -> bool:
    pairs = (
        (item.shape, region.shape),
        (item.colour, region.colour),
        (item.size, region.size),
        (item.location, region.location),
    )
    return all(want is None or want == got for want, got in pairs)


# --- Reading an image


def _read(images: Sequence[object] | np.ndarray) -> list[tuple[list[Region], int]]:
    """Per image: the regions and the number of stray pixels."""
    regions, strays = [], []
    for index, image in enumerate(images):
        masks, stray = _segment(_pixels(image))
        regions += [(index, colour, mask) for colour, mask in masks.items()]
        strays.append(stray)
    out: list[tuple[list[Region], int]] = [([], s) for s in strays]
    for start in range(0, len(regions), 128):
        part = regions[start : start + 128]
        for (index, _colour, _mask), region in zip(
            part, _fit([(c, m) for _, c, m in part]), strict=True
        ):
            out[index][0].append(region)
    return out


def _pixels(image: object) -> np.ndarray:
    a = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    n = shapes.IMAGE_SIZE
    if a.shape != (n, n, 3) or a.dtype != np.uint8:
        raise ValueError(f"the image is {a.dtype} {list(a.shape)}; expected uint8 [{n}, {n}, 3]")
    return a.astype(np.float32)


def share_of_colour(image: object, colour: str) -> float:
    """Return the share of an image's pixels, of any size, that are nearest to a colour and near."""
    p = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    distance = [_shade_distance(p.astype(np.float32), c) for c in shapes.PALETTE.values()]
    nearest = np.argmin(distance, 0) == list(shapes.PALETTE).index(colour)
    return float((nearest & (np.min(distance, 0) < CORE_DISTANCE)).mean())


def _shade_distance(p: np.ndarray, colour: Sequence[float]) -> np.ndarray:
    """Distance of every pixel to a colour at its nearest shade (lit from above: 0.88 to 1.12 of
    it).
    """
    c = np.asarray(colour, np.float32)
    s = np.clip(p @ c / (c @ c), 0.86, 1.14)[..., None]
    return np.linalg.norm(p - np.minimum(s * c, 255), axis=-1)


def _around(a: np.ndarray, k: int) -> np.ndarray:
    """Sum over the (2k+1)-square around each pixel of an array [64, 64]."""
    for axis in (0, 1):
        pad = [(k + 1, k) if i == axis else (0, 0) for i in (0, 1)]
        c = np.cumsum(np.pad(a.astype(np.float32), pad), axis)
        a = np.take(c, range(2 * k + 1, c.shape[axis]), axis) - np.take(
            c, range(c.shape[axis] - 2 * k - 1), axis
        )
    return a


@functools.cache
def _smoother() -> np.ndarray:
    i = np.arange(shapes.IMAGE_SIZE, dtype=np.float32)
    return np.exp(-((i[:, None] - i) ** 2) / (2 * 7.0**2))


def _segment(p: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
    """Coverage [64, 64] of every colour that is present, and the number of stray pixels."""
    distance = np.stack([_shade_distance(p, c) for c in shapes.PALETTE.values()])
    nearest, core = distance.argmin(0), distance.min(0) < CORE_DISTANCE
    cores = {}
    for k, name in enumerate(shapes.PALETTE):
        mine = core & (nearest == k)
        mine &= _around(mine, 1) > 3.5  # drops specks and single noisy pixels
        if mine.sum() >= MIN_CORE and np.median(distance[k][mine]) < PURE_DISTANCE:
            cores[name] = mine
    taken = np.zeros(p.shape[:2], bool)
    for mine in cores.values():
        taken |= mine
    halo = _around(taken, 2) > 0.5

    # The background under a shape is the mean of its surroundings, weighted by nearness.
    free, g = (~halo).astype(np.float32) + 1e-6, _smoother()
    weight = g @ free @ g.T
    back = np.stack([g @ (free * p[..., c]) @ g.T / weight for c in range(3)], -1)
    stray = int(((np.linalg.norm(p - back, axis=-1) > STRAY_DISTANCE) & ~halo).sum())

    rows = np.arange(shapes.IMAGE_SIZE, dtype=np.float32)[:, None, None]
    masks = {}
    for name, mine in cores.items():
        middle = (rows[..., 0] * mine).sum() / mine.sum()
        shade = 1 - 0.12 * (rows - middle) / 14
        colour = np.median((p / shade)[mine], 0)
        span = np.minimum(colour * shade, 255) - back
        alpha = ((p - back) * span).sum(-1) / (span**2).sum(-1)
        mask = np.clip(alpha, 0, 1) * (_around(mine, 2) > 0.5)
        for other, theirs in cores.items():
            if other != name:
                mask = mask * ~theirs
        masks[name] = mask.astype(np.float32)
    return masks, stray


# --- Fitting shapes


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Templates [S * n, 38 * 38] grouped by shape, their squared norms [S * n], radii [n] and
    offsets (x, y) [n, 2].
    """
    shifts = np.arange(-_REACH, _REACH + 1, dtype=np.float32)
    r, dy, dx = (
        v.ravel()
        for v in np.meshgrid(np.arange(6, 15, 0.75, np.float32), shifts, shifts, indexing="ij")
    )
    window = slice(32 - _HALF, 32 + _HALF)
    templates = np.concatenate(
        [_draw(s, r, 32 + dx, 32 + dy)[:, window, window] for s in shapes.SHAPES]
    )
    templates = templates.reshape(len(templates), -1)
    return templates, (templates**2).sum(-1), r, np.stack([dx, dy], -1)


def _draw(shape: str, radius: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coverage of the renderer for many radii and centres: [n, 64, 64]."""

    def as_column(v):
        return np.asarray(v, np.float32)[:, None, None]

    return shapes.coverage(shape, as_column(radius), as_column(x), as_column(y))


def _jaccard(ab: np.ndarray, aa: np.ndarray | float, bb: np.ndarray | float) -> np.ndarray:
    return ab / (aa + bb - ab)


def _fit(regions: list[tuple[str, np.ndarray]]) -> list[Region]:
    """Best shape for every (colour, mask): all templates on whole pixels, then the three best
    shapes at subpixel resolution.
    """
    templates, norms, radii, offsets = _bank()
    windows, middles = [], []
    for _, mask in regions:
        total = mask.sum()
        y, x = (
            round(float((mask.sum(1 - axis) * np.arange(len(mask))).sum() / total))
            for axis in (0, 1)
        )
        windows.append(np.pad(mask, _HALF)[y : y + 2 * _HALF, x : x + 2 * _HALF].ravel())
        middles.append((x, y))
    # of the whole image: far parts count too
    squares = np.array([(m**2).sum() for _, m in regions], np.float32)
    scores = _jaccard(np.stack(windows) @ templates.T, squares[:, None], norms).reshape(
        len(regions), len(shapes.SHAPES), -1
    )
    best = scores.argmax(-1)
    out = []
    for (colour, mask), middle, score, at in zip(regions, middles, scores, best, strict=True):
        order = np.argsort(-score[np.arange(len(at)), at])[:3]
        fits = [
            _refine(shapes.SHAPES[k], mask, radii[at[k]], offsets[at[k]] + middle) for k in order
        ]
        iou, shape, radius, x, y = max(fits)
        row, col = (int(np.argmin([abs(v - a) for a in shapes.ANCHORS])) for v in (y, x))
        size = "small" if radius < SIZE_BORDER else "large"
        out.append(
            Region(colour, shape, size, shapes.LOCATIONS[3 * row + col], radius, (x, y), iou)
        )
    return out


def _refine(
    shape: str, mask: np.ndarray, radius: float, centre: np.ndarray
) -> tuple[float, str, float, float, float]:
    """Best (score, shape, radius, x, y) near a coarse fit, to an eighth of a pixel."""
    square, iou = float((mask**2).sum()), 0.0
    at = np.array([radius, *centre], np.float32)
    steps = np.stack(
        np.meshgrid(*[np.array([0, -1, 1], np.float32)] * 3, indexing="ij"), -1
    ).reshape(-1, 3)
    for step in (0.5, 0.25, 0.125):
        tries = at + step * steps
        t = _draw(shape, *tries.T).reshape(len(tries), -1)
        score = _jaccard(t @ mask.ravel(), (t**2).sum(-1), square)
        at, iou = tries[score.argmax()], float(score.max())
    return iou, shape, float(at[0]), float(at[1]), float(at[2])
