"""Synthetic dataset of captioned human motion: the program that moves the skeleton.

Every clip starts in the rest pose at the origin, facing +z, and is planned as a few curves:
position and heading of the pelvis, positions of the balls of the feet, lift of the heels, and
angles of spine and arms. The legs follow from an inverse kinematics of two bones, so a standing
foot does not slide. Steps are planned along a path ``s -> (x, z, heading)``: a line, a circle or a
point to turn on. With ``m`` the mean of both feet along it and ``S`` the frames of one step, the
pelvis is at::

    (m[t - S/2] / 2 + m[t - S/2 + 1] + ... + m[t + S/2 - 1] + m[t + S/2] / 2) / S

which is steady while steps are, and begins and ends smoothly.

A caption leaves little open, so that a small model can learn the rest: its omitted attributes, and
a ``Style`` of two bits. Steps and repetitions begin on a grid of four frames, and each full caption
has one length. The pelvis stays upright; the spine leans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from gen.media.motion.skeleton import JOINTS, OFFSETS, STANDING, Motion, axis_rotation, joint
from gen.modalities.motion.captions import CIRCLES, Caption, complete, options

GRID = 4  # frames; a clip has a multiple of it, plus one pose
MIN_POSES, MAX_POSES = 33, 197
REST = (
    8  # frames of standing at the start and the end, some of which anticipate a step or follow one
)
_SIDES = ("left", "right")
# half the width of the stance; ankle to ball
_HALF, _BALL = (float(OFFSETS[joint("left_hip"), 0]), OFFSETS[joint("left_foot")])
_THIGH, _SHIN = -float(OFFSETS[joint("left_knee"), 1]), -float(OFFSETS[joint("left_ankle"), 1])

PACES = {  # action and direction: frames and metres of one step, slowly and quickly
    ("walks", "forward"): {"slowly": (12, 0.42), "quickly": (8, 0.60)},
    ("walks", "backward"): {"slowly": (12, -0.30), "quickly": (8, -0.44)},
    ("walks", "circle"): {"slowly": (12, 0.42), "quickly": (8, 0.60)},
    ("runs", "forward"): {"slowly": (8, 0.80), "quickly": (6, 0.90)},
}
CIRCLE_STEPS = 10  # of a whole circle
TURN_STEPS = {"slowly": (8, 4), "quickly": (6, 2)}  # frames of a step, and steps of a quarter turn
PERIODS = {  # frames of one repetition, including the rest after it
    "turns": {"slowly": 40, "quickly": 20},
    "jumps": {None: 44},
    "waves": {"slowly": 16, "quickly": 8},
    "kicks": {"slowly": 40, "quickly": 20},
    "squats": {"slowly": 48, "quickly": 24},
    "bows": {"slowly": 48, "quickly": 24},
}
RAISE = 8  # frames in which a waving hand goes up, or down
SIT = {"slowly": 32, "quickly": 16}
HOPS = {
    "in place": (0.0, 0.0),
    "forward": (0.0, 0.45),
    "backward": (0.0, -0.35),
    "left": (0.4, 0.0),
    "right": (-0.4, 0.0),
}  # x, z in m
FLIGHT, GRAVITY = 8, 9.81 / 20**2  # frames; metres per frame and frame


@dataclass(frozen=True)
class Style:
    """Choices that no caption states: wide movements (strides, jumps, kicks, squats, bows), and a
    wide swing of the arms.
    """

    wide: bool = False
    free: bool = False

    @property
    def width(self) -> float:
        """Factor on the width of movements."""
        return 1.06 if self.wide else 0.94

    @property
    def swing(self) -> float:
        """Factor on the swing of the arms."""
        return 1.2 if self.free else 0.7


STYLES = tuple(Style(*bits) for bits in product((False, True), repeat=2))


def draw(caption: Caption, rng: np.random.Generator) -> Motion:
    """Draw a motion that passes the checker for a caption: 4n + 1 poses, ``MIN_POSES`` to
    ``MAX_POSES``. Omitted attributes and the style are drawn.
    """
    return perform(complete(caption, rng), STYLES[rng.integers(len(STYLES))])


def perform(caption: Caption, style: Style = STYLES[0]) -> Motion:
    """Render the motion of a full caption.

    Raises:
        ValueError: the caption omits an attribute.
    """
    missing = [
        k
        for k, values in options(caption.action, caption.direction).items()
        if values and getattr(caption, k) is None
    ]
    if missing:
        raise ValueError(
            f"'{caption}' omits its {' and '.join(missing)}; expected a caption with all attributes"
        )
    return _PERFORM[caption.action](caption, style).motion()


def lengths(caption: Caption) -> tuple[int, ...]:
    """Possible numbers of poses of a caption's clips, in ascending order: one number for a full
    caption.
    """
    values = options(caption.action, caption.direction)
    possible = [
        (stated,) if stated else allowed or (None,)
        for stated, allowed in (
            (caption.speed, values["speed"]),
            (caption.count, values["count"]),
            (caption.side, values["side"][:1]),  # the side does not matter
        )
    ]
    every = (Caption(caption.action, caption.direction, *chosen) for chosen in product(*possible))
    return tuple(sorted({_frames(c) + 1 for c in every}))


def _frames(c: Caption) -> int:
    """Frames of a full caption, without the first pose."""
    if c.action in ("walks", "runs"):
        busy = (c.count or CIRCLE_STEPS) * _pace(c)[0]
    else:
        busy = (
            SIT[c.speed]
            if c.action == "sits"
            else c.count * PERIODS[c.action][c.speed] + 2 * RAISE * (c.action == "waves")
        )
    whole = -(-(2 * REST + busy) // GRID) * GRID
    return max(whole, MIN_POSES - 1)


def active(action: str, speed: str) -> int:
    """Frames of a kick, squat or bow, without the rest after it."""
    return PERIODS[action][speed] * 5 // 6


def _pace(c: Caption) -> tuple[int, float]:
    return PACES[c.action, "circle" if c.direction in CIRCLES else c.direction][c.speed]


# --- Curves


def _ease(u: np.ndarray) -> np.ndarray:
    """Smooth step from 0 to 1 while u goes from 0 to 1, at rest at both ends."""
    u = np.clip(u, 0, 1)
    return u * u * (3 - 2 * u)


def _through(t: np.ndarray, *points: tuple[float, float]) -> np.ndarray:
    """Curve through (frame, value), at rest in each, and beyond the first and the last."""
    out = np.full(len(t), float(points[0][1]))
    for (a, u), (b, v) in pairwise(points):
        out += (v - u) * _ease((t - a) / (b - a))
    return out


def _box(x: np.ndarray, width: int) -> np.ndarray:
    """Mean over ``width`` frames (even) around each: [T, ...] -> [T, ...]."""
    half = width // 2
    x = np.concatenate([np.repeat(x[:1], half, 0), x, np.repeat(x[-1:], half, 0)])
    weights = np.ones(width + 1)
    weights[[0, -1]] = 0.5
    return sum(w * x[i : i + len(x) - width] for i, w in enumerate(weights)) / width


@dataclass
class _Plan:
    """Clip as curves over T frames, at rest until they are set. Angles in radians, positive forward
    and up unless noted.
    """

    frames: int
    position: np.ndarray = field(init=False)  # x and z of the pelvis [T, 2]
    height: np.ndarray = field(init=False)  # of the pelvis, above standing [T]
    yaw: np.ndarray = field(init=False)  # heading [T]
    feet: np.ndarray = field(init=False)  # the balls: left and right, x, y, z [T, 2, 3]
    toes: np.ndarray = field(init=False)  # their heading [T, 2]
    heels: np.ndarray = field(init=False)  # lift around the balls [T, 2]
    lean: np.ndarray = field(init=False)  # of spine1, spine2 and spine3 [T, 3]
    shoulders: np.ndarray = field(init=False)  # forward, and away from the body [T, 2, 2]
    elbows: np.ndarray = field(init=False)  # forward, and away from the body [T, 2, 2]

    def __post_init__(self) -> None:
        n = self.frames + 1
        self.position, self.height, self.yaw, self.lean = (
            np.zeros((n, 2)),
            np.zeros(n),
            np.zeros(n),
            np.zeros((n, 3)),
        )
        self.feet, self.toes, self.heels = np.zeros((n, 2, 3)), np.zeros((n, 2)), np.zeros((n, 2))
        self.feet[:, :, 0], self.feet[:, :, 2] = (_HALF, -_HALF), _BALL[2]
        self.shoulders, self.elbows = np.zeros((n, 2, 2)), np.zeros((n, 2, 2))

    @property
    def t(self) -> np.ndarray:
        return np.arange(self.frames + 1)

    def motion(self) -> Motion:
        root = np.stack([self.position[:, 0], STANDING + self.height, self.position[:, 1]], -1)
        local = np.tile(np.eye(3), (self.frames + 1, len(JOINTS), 1, 1))
        local[:, 0] = axis_rotation("y", self.yaw)
        for i, name in enumerate(("spine1", "spine2", "spine3")):
            local[:, joint(name)] = axis_rotation("x", self.lean[:, i])
        for i, (side, out) in enumerate(zip(_SIDES, (1, -1), strict=True)):
            for name, angles in (("shoulder", self.shoulders), ("elbow", self.elbows)):
                turned = axis_rotation("z", out * angles[:, i, 1]) @ axis_rotation(
                    "x", -angles[:, i, 0]
                )
                local[:, joint(f"{side}_{name}")] = turned
            leg = _leg(
                root,
                self.yaw,
                self.feet[:, i],
                self.toes[:, i],
                self.heels[:, i],
                OFFSETS[joint(f"{side}_hip")],
            )
            for name, rotation in zip(("hip", "knee", "ankle"), leg, strict=True):
                local[:, joint(f"{side}_{name}")] = rotation
        return Motion(root, local)


def _leg(root, yaw, ball, toes, heel, hip) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Local rotations [T, 3, 3] of hip, knee and ankle that bring the ball of a foot to its
    position. The knee bends in the plane half-way between the headings of pelvis and toes. A foot
    out of reach hangs from a straight leg.
    """
    ahead = toes - yaw
    foot = axis_rotation("y", ahead) @ axis_rotation("x", heel)  # in the frame of the pelvis
    away = _turned(ball - root, -yaw) - hip - foot @ _BALL  # from hip to ankle
    length = np.linalg.norm(away, axis=-1, keepdims=True)
    down = away / length
    length = np.minimum(length, (_THIGH + _SHIN) * (1 - 1e-12))
    front = np.stack([np.sin(ahead / 2), 0 * ahead, np.cos(ahead / 2)], -1)
    front -= (front * down).sum(-1, keepdims=True) * down
    front /= np.linalg.norm(front, axis=-1, keepdims=True)
    cos = (_THIGH**2 + length**2 - _SHIN**2) / (2 * _THIGH * length)
    knee = _THIGH * (cos * down + np.sqrt(1 - cos**2) * front)
    across = np.cross(front, down)

    def frame(bone):
        # whose -y lies along the bone
        return np.stack([across, -bone, np.cross(across, -bone)], -1)

    thigh, shin = frame(knee / _THIGH), frame((length * down - knee) / _SHIN)
    return thigh, np.swapaxes(thigh, -1, -2) @ shin, np.swapaxes(shin, -1, -2) @ foot


def _turned(v: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    return (axis_rotation("y", yaw) @ v[..., None])[..., 0]


# --- Steps


def _steps(
    p: _Plan,
    goals: list[float],
    first: int,
    starts: np.ndarray,
    step: int,
    *,
    air: int,
    lift: float,
    heel: float,
) -> np.ndarray:
    """Positions of both feet along the path [T, 2], which step to their goals in turn; heels lift
    on the way. Step i begins in frame ``starts[i]`` and takes ``step`` frames. Feet leave the floor
    ``air`` frames before the other one lands, or after it if negative.
    """
    along = np.zeros((len(p.t), 2))
    at = [0.0, 0.0]
    for i, (goal, start) in enumerate(zip(goals, starts, strict=True)):
        foot = (first + i) % 2
        follows = i > 0 and starts[i - 1] + step == start
        a, b = start - air * follows, start + step - max(-air, 0)
        u = (p.t - a) / (b - a)
        along[:, foot] += (goal - at[foot]) * _ease(u)
        p.feet[:, foot, 1] += lift * np.sin(np.pi * np.clip(u, 0, 1)) ** 2
        p.heels[:, foot] += heel * np.where(
            p.t < a, _ease(1 + (p.t - a) / (0.4 * step)), _ease(1 - u / 0.7)
        )
        at[foot] = goal
    return along


def _follow(
    p: _Plan,
    along: np.ndarray,
    step: int,
    path: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> None:
    """Put the feet on the path and the pelvis between them."""
    x, z, p.yaw = path(_box(along.mean(1), step))
    p.position = np.stack([x, z], -1)
    for foot, side in enumerate((_HALF, -_HALF)):
        x, z, toes = path(along[:, foot])
        out = _turned(np.array([side, 0.0, _BALL[2]]) + np.zeros((len(x), 3)), toes)
        p.feet[:, foot, 0], p.feet[:, foot, 2], p.toes[:, foot] = x + out[:, 0], z + out[:, 2], toes


def _travels(c: Caption, style: Style) -> _Plan:
    p, running = _Plan(_frames(c)), c.action == "runs"
    step, stride = _pace(c)
    stride, count = stride * style.width, c.count or CIRCLE_STEPS
    circle = CIRCLES.index(c.direction) if c.direction in CIRCLES else None
    goals = [stride * min(i + 1, count - 1) for i in range(count)]
    starts = REST + step * np.arange(count)
    air = step // 2 if running else -1
    along = _steps(
        p,
        goals,
        circle or 0,
        starts,
        step,
        air=air,
        lift=0.30 if running else 0.07,
        heel=0.9 if running else 0.5,
    )
    if circle is None:
        _follow(p, along, step, lambda s: (0 * s, s, 0 * s))
    else:
        radius, sign = stride * (count - 1) / (2 * np.pi), 1 - 2 * circle
        _follow(
            p,
            along,
            step,
            lambda s: (
                sign * radius * (1 - np.cos(s / radius)),
                radius * np.sin(s / radius),
                sign * s / radius,
            ),
        )
    going = _box(((p.t >= REST) & (p.t <= starts[-1] + step)).astype(float), step)
    reach = _THIGH + _SHIN
    far = (0.4 if running else 0.55) * stride  # vector from below a hip to its standing foot
    p.height -= going * (reach - np.sqrt(reach**2 - far**2) + 0.01)
    if running:
        # highest in the middle of the flight
        p.height += 0.05 * going * np.cos(2 * np.pi * (p.t - REST + air / 2) / step)
    apart = _box((along[:, 1] - along[:, 0]) / stride, 2)
    swing = (0.55 if running else 0.35) * style.swing
    p.shoulders[:, :, 0] = swing * apart[:, None] * (1, -1)
    p.elbows[:, :, 0] = going[:, None] * (1.4 if running else 0.3)
    p.lean[:, 0] = going * (0.2 if running else 0.04)
    return p


def _turns(c: Caption, style: Style) -> _Plan:
    p, (step, n), sign = (
        _Plan(_frames(c)),
        TURN_STEPS[c.speed],
        {"left": 1, "right": -1}[c.direction],
    )
    goals = [
        sign * np.pi / 2 * (turn + 2 * (i // 2 + 1) / n)
        for turn in range(c.count)
        for i in range(n)
    ]
    starts = REST + np.array(
        [turn * PERIODS["turns"][c.speed] + i * step for turn in range(c.count) for i in range(n)]
    )
    along = _steps(
        p, goals, 0 if sign > 0 else 1, starts, step, air=-1, lift=0.07 * style.width, heel=0.4
    )
    _follow(p, along, step, lambda s: (0 * s, 0 * s, s))
    apart = abs(along[:, 1] - along[:, 0])
    p.height -= 0.03 * _box(np.minimum(apart, 1), 4)
    p.shoulders[:, :, 1] = 0.3 * style.swing * _box(np.minimum(apart, 1), 4)[:, None]
    return p


# --- Repetitions without travel


def _repeated(
    p: _Plan, c: Caption, first: int, one: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Curve for one repetition, zero before and after it, repeated as often as the caption states:
    [T].
    """
    period = PERIODS[c.action][c.speed]
    return sum(one(p.t - first - i * period) for i in range(c.count))


def _down(c: Caption) -> Callable[[np.ndarray], np.ndarray]:
    """Curve from 0 to 1 and back within a repetition, the last sixth of which is a rest."""
    busy = active(c.action, c.speed)
    return lambda t: _through(t, (0, 0), (busy / 2 - 1, 1), (busy / 2 + 1, 1), (busy, 0))


def _jumps(c: Caption, style: Style) -> _Plan:
    p, crouch, push, tip = _Plan(_frames(c)), 10, 6, 0.8
    # height on tiptoe, with a little play in the knees
    rise = _BALL[1] * (1 - np.cos(tip)) + _BALL[2] * np.sin(tip) - 0.012
    off, land = crouch + push, crouch + push + FLIGHT
    # frames from which an even push ends with the speed of the flight
    depth = GRAVITY * FLIGHT / 2 * push / 2 - rise

    def height(t: np.ndarray) -> np.ndarray:
        t = np.minimum(t, off + land - t)  # landing mirrors the push
        air = rise + GRAVITY / 2 * (t - off) * (FLIGHT - (t - off))
        pushed = -depth + (depth + rise) * ((t - crouch) / push) ** 2
        return np.where(t > off, air, np.where(t > crouch, pushed, -depth * _ease(t / crouch)))

    p.height = _repeated(p, c, REST, height)

    def in_air(t):
        return np.clip((t - off) / FLIGHT, 0, 1)

    tucked = _repeated(p, c, REST, lambda t: 0.06 * style.width * np.sin(np.pi * in_air(t)) ** 2)
    lifted = _repeated(p, c, REST, lambda t: GRAVITY / 2 * FLIGHT**2 * in_air(t) * (1 - in_air(t)))
    p.feet[:, :, 1] += (tucked + lifted)[:, None]
    p.heels += _repeated(
        p, c, REST, lambda t: _through(t, (off - 4, 0), (off, tip), (land, tip), (land + 4, 0))
    )[:, None]
    move = style.width * np.array(HOPS[c.direction])
    p.position += (
        _repeated(p, c, REST, lambda t: _ease((t - off + 4) / (FLIGHT + 8)))[:, None] * move
    )
    p.feet[:, :, [0, 2]] += (_repeated(p, c, REST, lambda t: _ease(in_air(t)))[:, None] * move)[
        :, None
    ]
    end = off + land

    def bent(t):
        return _through(
            t, (0, 0), (crouch, 0.5), (off, 0.05), (land, 0.05), (end - crouch, 0.5), (end, 0)
        )

    p.lean[:, 0] = _repeated(p, c, REST, bent)

    def arms(t):
        return _through(
            t, (0, 0), (crouch, -0.6), (off + 2, 1.8), (land, 1.2), (end - crouch, 0.2), (end, 0)
        )

    p.shoulders[:, :, 0] = style.swing * _repeated(p, c, REST, arms)[:, None]
    return p


def _waves(c: Caption, style: Style) -> _Plan:
    p, period = _Plan(_frames(c)), PERIODS["waves"][c.speed]
    begin, end = REST + RAISE, REST + RAISE + c.count * period
    up = _through(p.t, (REST, 0), (begin, 1), (end, 1), (end + RAISE, 0))
    side = np.where((p.t >= begin) & (p.t <= end), np.sin(2 * np.pi * (p.t - begin) / period), 0)
    for i, name in enumerate(_SIDES):
        if c.side in (name, "both"):
            p.shoulders[:, i, 1] = 1.75 * up + 0.2 * side * style.width
            p.shoulders[:, i, 0] = 0.25 * style.swing * up
            p.elbows[:, i, 1] = 1.3 * up + 0.7 * side * style.width
    return p


def _kicks(c: Caption, style: Style) -> _Plan:
    p = _Plan(_frames(c))
    kick = _repeated(p, c, REST, _down(c))
    leg = _SIDES.index(c.side)
    angle, short = 1.25 * style.width * kick, 0.06 * np.sin(np.pi * kick) ** 2
    on = _through(p.t, (0, 0), (REST, 1), (p.frames - REST, 1), (p.frames, 0))
    p.position[:, 0] = on * _HALF * 0.5 * (2 * leg - 1)  # onto the standing leg
    p.height -= 0.012 * on
    p.heels[:, leg] = -0.9 * angle
    hip = np.stack(
        [
            np.full(len(p.t), (_HALF, -_HALF)[leg]),
            p.height + STANDING + OFFSETS[joint("left_hip"), 1],
            0 * angle,
        ],
        -1,
    )
    reach = hip[:, 1] + _BALL[1] - short * (_THIGH + _SHIN)
    ankle = hip + reach[:, None] * np.stack([0 * angle, -np.cos(angle), np.sin(angle)], -1)
    p.feet[:, leg] = ankle + axis_rotation("x", p.heels[:, leg]) @ _BALL
    p.lean[:, 0] = -0.15 * kick
    p.shoulders[:, 1 - leg, 0] = 0.6 * style.swing * kick
    p.shoulders[:, leg, 0] = -0.4 * style.swing * kick
    p.shoulders[:, :, 1] = 0.25 * on[:, None]
    return p


def _squats(c: Caption, style: Style) -> _Plan:
    p = _Plan(_frames(c))
    down = _repeated(p, c, REST, _down(c))
    p.height -= 0.38 * style.width * down
    p.position[:, 1] = -0.10 * down
    p.lean[:, 0] = 0.6 * down
    p.shoulders[:, :, 0] = (1.2 + 0.5 * style.swing) * down[:, None]
    return p


def _bows(c: Caption, style: Style) -> _Plan:
    p = _Plan(_frames(c))
    down = _repeated(p, c, REST, _down(c))
    p.lean = style.width * down[:, None] * (0.55, 0.4, 0.25)
    p.position[:, 1] = -0.08 * down
    p.height -= 0.008 * down
    p.shoulders[:, :, 0] = (0.3 + 0.6 * style.swing) * down[:, None]
    return p


def _sits(c: Caption, style: Style) -> _Plan:
    p = _Plan(_frames(c))
    busy = SIT[c.speed]
    down = _through(p.t, (REST, 0), (REST + busy, 1))
    p.height -= (0.455 - 0.2 * (style.width - 1)) * down
    p.position[:, 1] = -0.34 * down
    p.lean[:, 0] = _through(p.t, (REST, 0), (REST + busy / 2, 0.6), (REST + busy, 0.05))
    p.shoulders[:, :, 0] = (0.3 + 0.2 * style.swing) * down[:, None]
    p.elbows[:, :, 0] = 0.9 * down[:, None]
    return p


_PERFORM = {
    "walks": _travels,
    "runs": _travels,
    "turns": _turns,
    "jumps": _jumps,
    "waves": _waves,
    "kicks": _kicks,
    "squats": _squats,
    "bows": _bows,
    "sits": _sits,
}
