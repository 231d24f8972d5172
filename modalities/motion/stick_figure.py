"""Renderer of motions: a stick figure on a chequered floor, in perspective.

The figure's left arm and leg are orange, its right ones blue; a dot on the head shows the gaze. The
floor is a grid of half metres that stands still in the world, so translation is visible even when
the camera follows; the figure's path stays on the floor behind it. With ``e`` the direction to the
camera, ``c`` the point looked at, ``D`` the distance and ``r``, ``u`` right and up of the image::

    v = p - c          x = F (r.v) / (D - e.v)          y = -F (u.v) / (D - e.v)          in
                       image sides from the middle

``D`` is the smallest distance that shows every joint of every frame, but at least ``NEAR``, so
figures of most motions have one size. Drawn with Pillow at ``FINE`` times the size and averaged;
equal motions give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw

from gen.core.errors import GenError, bad_value
from gen.media.motion.skeleton import FPS, JOINTS, STANDING, Motion, joint, kinematics

FINE = 3
FOCAL = 2.2  # image sides: a narrow angle, which keeps limbs in proportion
NEAR = 5.4  # metres: a standing figure fills three quarters of the height
MARGIN = 0.04  # image sides
SMOOTH = 0.5  # seconds: standard deviation of the Gaussian that smooths the camera's path
# metres between lines, and from the point looked at to the distance at which they have faded
GRID, REACH = (0.5, 3.5)

GROUND, LINES, SHADOW, PATH = (248, 248, 246), (198, 203, 211), (226, 228, 231), (160, 167, 178)
LEFT, RIGHT, BODY, FACE = (236, 112, 48), (42, 110, 187), (58, 64, 78), (248, 248, 246)
# metres, in the frame of the joint that carries them
_HAND, _TOE, _HEAD, _NOSE = ((0, -0.09, 0), (0, 0, 0.07), (0, 0.07, 0.0), (0, 0.08, 0.10))
_HEAD_RADIUS = 0.115


@dataclass(frozen=True)
class _Limb:
    """Bones that are drawn together, near ones over far ones."""

    colour: tuple[int, int, int]
    radius: float  # metres
    # indices of points; those from 22 on are the additional points
    paths: tuple[tuple[int, ...], ...]
    fill: tuple[int, ...] = ()  # the corners of an area


_EXTRA = {
    "left_wrist": _HAND,
    "right_wrist": _HAND,
    "left_foot": _TOE,
    "right_foot": _TOE,
}  # points 22 to 25
_N = len(JOINTS)


def _side(side: str, colour: tuple[int, int, int]) -> tuple[_Limb, _Limb]:
    def of(*parts):
        return tuple(joint(f"{side}_{part}") for part in parts)

    def end(part):
        return (_N + list(_EXTRA).index(f"{side}_{part}"),)

    arm = of("shoulder", "elbow", "wrist") + end("wrist")
    return _Limb(colour, 0.038, (arm,)), _Limb(
        colour, 0.046, (of("hip", "knee", "ankle", "foot") + end("foot"),)
    )


def _names(text):
    return tuple(joint(n) for n in text.split())


_LIMBS = (
    *_side("left", LEFT),
    *_side("right", RIGHT),
    _Limb(
        BODY,
        0.052,
        (
            _names("pelvis spine1 spine2 spine3 neck head"),
            _names("left_shoulder left_collar right_collar right_shoulder"),
            _names("right_shoulder right_hip left_hip left_shoulder"),
        ),
        _names("left_shoulder right_shoulder right_hip left_hip"),
    ),
)


def render(
    motion: Motion,
    size: int = 240,
    *,
    azimuth: float = 35.0,
    elevation: float = 16.0,
    follow: bool = True,
    frames: Sequence[int] | None = None,
) -> np.ndarray:
    """Render a motion as frames uint8 [T, size, size, 3], RGB.

    Args:
        motion: the motion.
        size: side of a frame in pixels, 32 to 2048.
        azimuth: degrees of the camera from +z towards +x.
        elevation: degrees of the camera above the point looked at.
        follow: move the camera smoothly with the pelvis. Otherwise it stands still and shows the
            whole way.
        frames: numbers of the frames to render; None for all.

    Raises:
        GenError: the size or the angles are out of range.
    """
    if not isinstance(size, int | np.integer) or not 32 <= size <= 2048:
        raise bad_value("size", size, "a whole number of pixels from 32 to 2048")
    if not np.isfinite(azimuth) or not 0 <= elevation <= 80:
        raise GenError(
            f"the camera is at azimuth {azimuth}, elevation {elevation}; expected finite degrees"
            " and an elevation from 0 to 80"
        )
    points, head, nose = _points(motion)
    camera = _Camera.fit(
        np.concatenate([points, head[:, None] + (0, _HEAD_RADIUS, 0)], 1),
        motion.root,
        azimuth,
        elevation,
        follow,
    )
    return np.stack(
        [
            _frame(camera, t, points[t], head[t], nose[t], motion.root[: t + 1], int(size))
            for t in (range(motion.frames) if frames is None else frames)
        ]
    )


def _points(motion: Motion) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joints and the ends of hands and feet [T, 26, 3], the middle of the head [T, 3] and the dot
    on it.
    """
    p, frames = kinematics(motion.root, motion.rotations)

    def at(name, offset):
        return p[:, joint(name)] + frames[:, joint(name)] @ np.array(offset, float)

    ends = [at(name, offset) for name, offset in _EXTRA.items()]
    return np.concatenate([p, np.stack(ends, 1)], 1), at("head", _HEAD), at("head", _NOSE)


@dataclass(frozen=True)
class _Camera:
    centres: np.ndarray  # [T, 3], the point looked at
    axes: np.ndarray  # [3, 3]: right, up, towards the camera
    distance: float
    reach: float  # metres of visible floor around the point looked at

    @classmethod
    def fit(
        cls, points: np.ndarray, root: np.ndarray, azimuth: float, elevation: float, follow: bool
    ) -> _Camera:
        a, e = np.radians(azimuth), np.radians(elevation)
        back = np.array([np.sin(a) * np.cos(e), np.sin(e), np.cos(a) * np.cos(e)])
        right = np.array([np.cos(a), 0, -np.sin(a)])
        axes = np.stack([right, np.cross(back, right), back])
        centres = (
            _smoothed(root) if follow else np.tile((root.min(0) + root.max(0)) / 2, (len(root), 1))
        )
        centres[:, 1] = STANDING - 0.06
        v = (points - centres[:, None]) @ axes.T
        needed = v[..., 2] + np.abs(v[..., :2]).max(-1) * FOCAL / (0.5 - MARGIN)
        reach = REACH + np.hypot(*(root - centres)[:, [0, 2]].T).max()
        return cls(centres, axes, max(NEAR, float(needed.max())), float(reach))

    def see(self, t: int, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Project points [..., 3] of frame t: x and y in image sides [..., 2], and the length of a
        metre there [...].
        """
        v = (points - self.centres[t]) @ self.axes.T
        metre = FOCAL / np.maximum(self.distance - v[..., 2], 0.1)
        return np.stack([0.5 + v[..., 0] * metre, 0.5 - v[..., 1] * metre], -1), metre


def _smoothed(root: np.ndarray) -> np.ndarray:
    reach = round(3 * SMOOTH * FPS)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (SMOOTH * FPS)) ** 2)
    padded = np.pad(root, ((reach, reach), (0, 0)), "edge")
    return np.stack([np.convolve(c, weights / weights.sum(), "valid") for c in padded.T], 1)


# --- Drawing


def _frame(
    camera: _Camera,
    t: int,
    points: np.ndarray,
    head: np.ndarray,
    nose: np.ndarray,
    way: np.ndarray,
    size: int,
) -> np.ndarray:
    side = FINE * size
    image = Image.new("RGB", (side, side), GROUND)
    draw = ImageDraw.Draw(image)
    flat = (1, 0, 1)
    for limb in _LIMBS:
        _strokes(draw, *camera.see(t, points * flat), limb, SHADOW, side)
    _floor(draw, camera, t, side)
    _polyline(draw, camera.see(t, way * flat)[0], PATH, side / 160, side)
    seen, metre = camera.see(t, points)
    near = [(metre[list({i for path in limb.paths for i in path})].mean(), limb) for limb in _LIMBS]
    middle, at = camera.see(t, head)
    for _, limb in sorted([*near, (at, None)], key=lambda pair: pair[0]):
        if limb is None:
            _disc(draw, middle, at, _HEAD_RADIUS + 0.014, GROUND, side)
            _disc(draw, middle, at, _HEAD_RADIUS, BODY, side)
            spot, spot_at = camera.see(t, nose)
            if spot_at > at:
                _disc(draw, spot, spot_at, 0.024, FACE, side)
        else:
            # a rim, which separates it from the things behind
            _strokes(draw, seen, metre, limb, GROUND, side, 0.014)
            _strokes(draw, seen, metre, limb, limb.colour, side)
            _joints(draw, seen, metre, limb, side)
    return np.asarray(image.reduce(FINE))


def _strokes(
    draw, seen: np.ndarray, metre: np.ndarray, limb: _Limb, colour, side: int, rim: float = 0.0
) -> None:
    for path in limb.paths:
        for i, k in pairwise(path):
            _bone(draw, seen[[i, k]], metre[[i, k]] * (limb.radius + rim), colour, side)
    if limb.fill:
        draw.polygon([tuple(p) for p in seen[list(limb.fill)] * side], fill=colour)


def _bone(draw, ends: np.ndarray, radii: np.ndarray, colour, side: int) -> None:
    """Draw two discs and the area between them: a bone that comes nearer grows thicker."""
    for end, radius in zip(ends, radii, strict=True):
        _disc(draw, end, 1.0, radius, colour, side)
    along = ends[1] - ends[0]
    length = np.hypot(*along)
    if length > 1e-6:
        across = np.array([-along[1], along[0]]) / length
        corners = [
            ends[0] + across * radii[0],
            ends[1] + across * radii[1],
            ends[1] - across * radii[1],
            ends[0] - across * radii[0],
        ]
        draw.polygon([tuple(c) for c in np.array(corners) * side], fill=colour)


def _joints(draw, seen: np.ndarray, metre: np.ndarray, limb: _Limb, side: int) -> None:
    if limb.colour != BODY:
        light = tuple(round(0.45 * c + 0.55 * 255) for c in limb.colour)
        for i in limb.paths[0][1:3]:  # elbow and wrist, knee and ankle
            _disc(draw, seen[i], metre[i], 0.5 * limb.radius, light, side)


def _disc(draw, at: np.ndarray, metre: float, radius: float, colour, side: int) -> None:
    (x, y), r = at * side, radius * metre * side
    draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def _polyline(draw, points: np.ndarray, colour, width: float, side: int) -> None:
    if len(points) > 1:
        draw.line(
            [tuple(p) for p in points * side],
            fill=colour,
            width=max(1, round(width)),
            joint="curve",
        )


def _floor(draw, camera: _Camera, t: int, side: int) -> None:
    """Draw lines every ``GRID`` metres of the world around the point looked at, paler with
    distance.
    """
    cx, _, cz = camera.centres[t]
    steps = np.linspace(-camera.reach, camera.reach, 2 * round(camera.reach / 0.25))
    for axis, middle, along in ((0, cx, cz), (2, cz, cx)):
        values = (
            np.arange(
                np.ceil((middle - camera.reach) / GRID),
                np.floor((middle + camera.reach) / GRID) + 1,
            )
            * GRID
        )
        lines = np.zeros((len(values), len(steps), 3))
        lines[..., axis], lines[..., 2 - axis] = values[:, None], steps + along
        seen = (camera.see(t, lines)[0] * side).tolist()
        off = np.hypot(values[:, None] - middle, (steps[:-1] + steps[1:]) / 2)
        share = np.clip(1 - off / camera.reach, 0, 1)[..., None] ** 0.7
        colours = np.rint(GROUND + share * np.subtract(LINES, GROUND)).astype(int).tolist()
        for ends, shades, seen_share in zip(seen, colours, share[..., 0] > 0.02, strict=True):
            for k in np.flatnonzero(seen_share):
                draw.line(
                    (*ends[k], *ends[k + 1]), fill=tuple(shades[k]), width=max(1, round(side / 280))
                )
