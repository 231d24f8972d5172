"""Checker of captioned motion, which reads the positions of the joints alone.

The nine actions have distinct marks, so recognition is measurement without a trained judge.
Measurements are in the frame that the person faces at the start, with heights above the floor under
the feet:

1. Jump: the pelvis rises well above standing while no foot touches the floor. Every rise is one
jump.
2. Walk or run: the pelvis ends half a metre or more away, or comes round a whole circle; in a run
both feet are in the air between steps. Steps are the swings of the distance between the feet, and
some foot must stand still while the pelvis moves on: a gliding person does not walk. The
displacement gives the direction.
3. Turn: a person who stays and turns makes quarter turns.
4. Otherwise, a forearm that points up and swings waves; a foot at the height of a knee kicks; a
pelvis that goes down squats where it comes up again and sits where it does not; and a trunk that
leans alone bows. Repetitions are counted with hysteresis.

Speeds are metres per second or seconds per repetition, on either side of the geometric mean of the
renderer's two. A clip is invalid if its bones do not keep their lengths, if a joint leaps, or if it
shows no action or several. An invalid clip never passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gen.contracts.modality import Verdict
from gen.media.motion.skeleton import (
    FPS,
    JOINTS,
    OFFSETS,
    PARENTS,
    STANDING,
    Motion,
    axis_rotation,
    joint,
)
from gen.modalities.motion import captions as moves
from gen.modalities.motion import synth as moves_draw
from gen.modalities.motion.captions import ACTIONS, CIRCLES, SPEEDS, Caption

MIN_POSES = 9
MAX_LEAP = 0.65  # metres between poses, of any joint; no clip has more than 0.4
MAX_STRETCH = 0.06  # metres by which bones differ from their lengths, on average over the clip
MAX_BONE_STRETCH = 0.15  # the same for one bone
MAX_FLOOR = 0.15  # metres, either way
RISE, FALL = (
    0.12,
    0.02,
)
# metres of the pelvis above standing: a jump begins and ends; running does not rise above standing
CLEAR = 0.08  # metres under both feet in a jump
TRAVEL = 0.55  # metres; only jumps end as far from the start
ROUND = 1.5 * np.pi  # of heading on the way round a circle
STRAIGHT = 0.7  # distance of start and end as a fraction of the way
STEP = 0.16  # metres: least change of the distance between the feet in a step
# metres by which the lower foot is higher between steps than within them in a run; less in a walk
FLIGHT = 0.03
RUN = 1.7  # metres per second; decides where the flight is doubtful
GLIDE = (
    # median speed of the lower foot while it is low, as a fraction of the pelvis's speed along the
    # way
    0.6
)
ASLANT = np.radians(35)  # tolerance of a direction
QUARTER = np.radians(30)  # tolerance of a quarter turn
UP, WAVE = (
    2.0,
    1.15,
)
# radians of a forearm away from hanging: threshold of a raised one; least swing from side to side
LIFT = 0.03  # metres that each foot leaves the floor in a turn
KICK = (0.32, 0.2)  # metres of an ankle above the floor: begins, ends
DIP = (0.24, 0.12)  # metres of the pelvis below standing
BOW = (0.42, 0.22)  # radians from the vertical, of the line from pelvis to neck
HOP = 0.15  # metres per jump, at least, of a jump with a direction
SWEEP = (0.25, 0.75)  # timed fraction of a quarter turn or of sitting down
SLACK = 1.7  # factor by which a speed may be outside the renderer's two


@dataclass(frozen=True)
class Movement:
    """Action of a person in a clip. ``fault`` is the reason why a clip has none; the other fields
    are empty then.
    """

    action: str = ""
    direction: str | None = None
    speed: str | None = None
    count: int | None = None
    side: str | None = None
    pace: float | None = None  # metres per second, or seconds per repetition, turn or way down
    fault: str = ""

    @property
    def caption(self) -> Caption | None:
        """Full caption, or ``None`` where the language has none, as for a count of five."""
        try:
            return Caption(self.action, self.direction, self.speed, self.count, self.side)
        except ValueError:
            return None

    def __str__(self) -> str:
        if self.fault:
            return self.fault
        if self.caption:
            return str(self.caption)
        unit = "steps" if self.action in ("walks", "runs") else "times"
        return (
            f"{Caption(self.action, self.direction, self.speed, None, self.side)}, {self.count}"
            f" {unit}"
        )


def check(motion: object, caption: Caption | str) -> Verdict:
    """Judge one clip (joint positions in metres, float [T, 22, 3], or a ``Motion``) against a
    caption. Omitted attributes match anything.
    """
    parsed = moves.parse(caption) if isinstance(caption, str) else caption
    movement = describe(motion)
    if movement.fault:
        return Verdict(False, False, movement.fault)
    stated = {k: v for k, v in vars(parsed).items() if v is not None}
    if all(getattr(movement, k) == v for k, v in stated.items()):
        return Verdict(True, True, f"saw {movement}")
    return Verdict(False, True, f"saw {movement}; expected {parsed}")


def check_many(motions: Sequence[object], captions: Sequence[Caption | str]) -> list[Verdict]:
    """Judge clips one by one.

    Raises:
        ValueError: the numbers of clips and captions differ.
    """
    if len(motions) != len(captions):
        raise ValueError(
            f"{len(motions)} clips and {len(captions)} captions; expected one caption per clip"
        )
    return [check(motion, caption) for motion, caption in zip(motions, captions, strict=True)]


def grade(motion: object, caption: Caption | str) -> float:
    """Return the share of a caption's attributes that a clip shows: action, direction, speed ...

    A clip that shows no action, or several, has 0.

    Args:
        motion: joint positions in metres, float [T, 22, 3], or a ``Motion``.
        caption: the caption.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    parsed = moves.parse(caption) if isinstance(caption, str) else caption
    movement = describe(motion)
    if movement.fault:
        return 0.0
    stated = [getattr(movement, k) == v for k, v in vars(parsed).items() if v is not None]
    return sum(stated) / len(stated)


def describe(motion: object) -> Movement:
    """Recognise the action in a clip (joint positions in metres, float [T, 22, 3], or a
    ``Motion``).
    """
    joints = motion.joints if isinstance(motion, Motion) else np.asarray(motion)
    fault = _fault(joints)
    return Movement(fault=fault) if fault else _watch(_Body(joints.astype(np.float64)))


def _fault(joints: np.ndarray) -> str:
    """Reason why a clip shows no person at all, or an empty text."""
    if (
        joints.ndim != 3
        or joints.shape[1:] != (len(JOINTS), 3)
        or not np.issubdtype(joints.dtype, np.floating)
        or len(joints) < MIN_POSES
    ):
        return (
            f"the clip is {joints.dtype} {list(joints.shape)}; expected floats [at least"
            f" {MIN_POSES}, {len(JOINTS)}, 3]"
        )
    if not np.isfinite(joints).all():
        return "the clip holds NaN or inf; expected finite positions"
    leap = np.linalg.norm(np.diff(joints, axis=0), axis=-1)
    if leap.max() > MAX_LEAP:
        frame, j = np.unravel_index(leap.argmax(), leap.shape)
        return (
            f"the {JOINTS[j]} leaps {leap.max():.2f} m after pose {frame}; expected at most"
            f" {MAX_LEAP} m"
        )
    bones = np.linalg.norm(joints[:, 1:] - joints[:, PARENTS[1:]], axis=-1)
    stretch = abs(bones - np.linalg.norm(OFFSETS[1:], axis=-1)).mean(0)
    if stretch.mean() > MAX_STRETCH or stretch.max() > MAX_BONE_STRETCH:
        worst = JOINTS[1 + stretch.argmax()]
        return (
            f"bones do not keep their lengths: off by {stretch.mean():.2f} m on average, that to"
            f" the {worst} by {stretch.max():.2f} m"
        )
    return ""


class _Body:
    """Clip in the frame that the person faces at the start, z ahead and x to the left, the pelvis
    starting at the origin.
    """

    def __init__(self, joints: np.ndarray) -> None:
        middle = np.concatenate([joints[:1], joints, joints[-1:]])
        joints = (
            middle[:-2] + 2 * joints + middle[2:]
        ) / 4  # removes jitter between single poses only
        across = sum(
            joints[:, joint(f"left_{part}")] - joints[:, joint(f"right_{part}")]
            for part in ("hip", "shoulder")
        )
        yaw = np.unwrap(np.arctan2(-across[:, 2], across[:, 0]))
        first = yaw[:4].mean()
        self.yaw = yaw - first
        feet = [joint("left_foot"), joint("right_foot")]
        self.floor = float(np.quantile(joints[:, feet, 1].min(1), 0.35))
        joints = joints - joints[:4, :1].mean(0) * (1, 0, 1) - (0, self.floor, 0)
        self.joints = joints @ axis_rotation("y", -first).T
        self.root = self["pelvis"]
        self.rise = self.root[:, 1] - STANDING
        self.feet = self.joints[:, feet]
        self.low = self.feet[:, :, 1].min(1)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.joints[:, joint(name)]

    def facing(self, v: np.ndarray) -> np.ndarray:
        """Vectors [T, 3] in the person's frame: left, up, ahead."""
        return (axis_rotation("y", -self.yaw) @ v[..., None])[..., 0]


def _watch(body: _Body) -> Movement:
    if abs(body.floor) > MAX_FLOOR:
        return Movement(
            fault=f"the feet stand at a height of {body.floor:.2f} m; expected the floor, 0"
        )
    if body.rise[:4].mean() < -DIP[0]:
        return Movement(
            fault=(
                f"the pelvis begins {-body.rise[:4].mean():.2f} m below standing; expected a person"
                " who stands"
            )
        )
    moved, turned = body.root[-4:].mean(0)[[0, 2]], float(body.yaw[-4:].mean())
    jumps = [b for b in _bouts(body.rise, RISE, FALL) if body.low[slice(*b)].max() > CLEAR]
    if jumps:
        return _jumping(moved / len(jumps), turned, len(jumps))
    travels = np.hypot(*moved) > TRAVEL or (abs(turned) > ROUND and _length(body) > 1.8)
    if travels or abs(turned) > np.pi / 4:
        found = _travelling(body, moved, turned) if travels else _turning(body, turned)
        other = _waving(body) or _sinking(body)
        return Movement(fault=_several(found, other)) if other and not found.fault else found
    # a person who sinks leans as well
    seen = [f for f in (_waving(body), _kicking(body), _sinking(body) or _bowing(body)) if f]
    if len(seen) == 1:
        return seen[0]
    if not seen:
        return Movement(fault="the person does nothing that a caption could state")
    return next((f for f in seen if f.fault), Movement(fault=_several(*seen)))


def _several(*seen: Movement) -> str:
    return (
        "the person does several things in one clip:"
        f" {' and '.join(f.action or f.fault for f in seen)}"
    )


# --- Actions


def _timed(action: str, pace: float, slow: float, quick: float, **attributes) -> Movement:
    """Movement with the nearer speed of ``slow`` and ``quick``: all in metres per second or all in
    seconds.
    """
    low, high = min(slow, quick) / SLACK, max(slow, quick) * SLACK
    if not low < pace < high:
        unit = "m/s" if action in ("walks", "runs") else "s"
        return Movement(
            fault=(
                f"a person {action} at a pace of {pace:.2f} {unit}; expected {low:.2f} to"
                f" {high:.2f}"
            )
        )
    fast = abs(np.log(pace / quick)) < abs(np.log(pace / slow))
    return Movement(action, speed=SPEEDS[int(fast)], pace=float(pace), **attributes)


def _direction(moved: np.ndarray) -> str:
    """Direction of a displacement (x, z), or an empty text between directions."""
    angle = float(np.arctan2(moved[0], moved[1]))
    names = {"forward": 0.0, "left": np.pi / 2, "right": -np.pi / 2, "backward": np.pi}
    return next(
        (n for n, a in names.items() if abs(np.angle(np.exp(1j * (angle - a)))) < ASLANT), ""
    )


def _jumping(moved: np.ndarray, turned: float, count: int) -> Movement:
    if abs(turned) > np.pi / 4:
        return Movement(fault=f"the person jumps and turns by {np.degrees(turned):.0f} degrees")
    direction = _direction(moved) if np.hypot(*moved) > HOP else "in place"
    return (
        Movement("jumps", direction, count=count)
        if direction
        else Movement(fault="the person jumps aslant")
    )


def _travelling(body: _Body, moved: np.ndarray, turned: float) -> Movement:
    ahead = body.facing(body.feet[:, 0] - body.feet[:, 1])[:, 2]
    turns = _swings(ahead, STEP)
    count = len(turns) - 1
    if count < 2:
        return Movement(fault=f"the person moves by {np.hypot(*moved):.1f} m without steps")
    pace, slide = _pace(body)
    if slide > GLIDE * pace:
        return Movement(fault="the person glides: no foot stands while the body moves on")
    low, inner = _even(body.low, 1), np.array(turns[1:-1])
    flight = float(
        low[inner].mean()
        - low[
            np.append(inner[1:] + inner[:-1], [turns[0] + inner[0], inner[-1] + turns[-1]]) // 2
        ].mean()
    )
    runs = (flight - FLIGHT) / FLIGHT + 2 * np.log(pace / RUN) > 0
    if abs(turned) > ROUND and not runs:
        if abs(abs(turned) - 2 * np.pi) > np.pi / 2:
            return Movement(
                fault=(
                    f"the person comes round by {abs(np.degrees(turned)):.0f} degrees; a circle"
                    " has 360"
                )
            )
        return _timed("walks", pace, *_paces("walks", "circle"), direction=CIRCLES[int(turned < 0)])
    direction, action, way = _direction(moved), "runs" if runs else "walks", _length(body)
    if np.hypot(*moved) < STRAIGHT * way:
        return Movement(
            fault=(
                f"the person goes {way:.1f} m and ends {np.hypot(*moved):.1f} m away; expected a"
                " line or a circle"
            )
        )
    if abs(turned) > np.pi / 4 or direction not in ACTIONS[action].directions:
        return Movement(
            fault=(
                f"the person {action} {direction or 'aslant'} and turns by"
                f" {np.degrees(turned):.0f} degrees; no caption states that"
            )
        )
    return _timed(action, pace, *_paces(action, direction), direction=direction, count=count)


def _pace(body: _Body) -> tuple[float, float]:
    """Speed of the pelvis in the middle half of its way, and there the median speed along it of the
    lower foot while it is low: both in metres per second.
    """
    way = np.diff(_even(body.root[:, [0, 2]]), axis=0) * FPS
    speed = np.linalg.norm(way, axis=-1)
    gone = np.cumsum(speed) / speed.sum()
    steady, lower, low = (
        (gone > 0.25) & (gone < 0.75),
        body.feet[:-1, :, 1].argmin(1),
        body.low[:-1],
    )
    steps = np.diff(body.feet[..., [0, 2]], axis=0)[np.arange(len(lower)), lower] * FPS
    along = (steps * way).sum(-1) / np.maximum(speed, 1e-6)
    return float(speed[steady].mean()), abs(
        float(np.median(along[steady & (low <= np.median(low[steady]))]))
    )


def _paces(action: str, direction: str) -> list[float]:
    return [
        abs(stride) / step * FPS
        for step, stride in (moves_draw.PACES[action, direction][s] for s in SPEEDS)
    ]


def _turning(body: _Body, turned: float) -> Movement:
    count, angle = round(abs(turned) / (np.pi / 2)), body.yaw * np.sign(turned)
    if abs(abs(turned) - count * np.pi / 2) > QUARTER:
        return Movement(
            fault=f"the person turns by {np.degrees(turned):.0f} degrees; expected quarter turns"
        )
    if body.feet[:, :, 1].max(0).min() < LIFT:
        return Movement(fault="the person turns without steps")
    seconds = (
        np.mean(
            [_passes(angle, *((i + share) * np.pi / 2 for share in SWEEP)) for i in range(count)]
        )
        / FPS
    )
    expected = [_sweep((n + 0.5) * step) for step, n in (moves_draw.TURN_STEPS[s] for s in SPEEDS)]
    return _timed(
        "turns", seconds, *expected, direction="left" if turned > 0 else "right", count=count
    )


def _sweep(frames: float) -> float:
    """Seconds of the timed part of a smooth change over ``frames`` frames."""
    u = np.linspace(0, 1, 1001)
    share = u * u * (3 - 2 * u)
    return float(((share > SWEEP[0]) & (share < SWEEP[1])).mean() * frames / FPS)


def _waving(body: _Body) -> Movement | None:
    counts, seconds = {}, []
    for side, out in (("left", 1), ("right", -1)):
        arm = body.facing(body[f"{side}_wrist"] - body[f"{side}_elbow"])
        # from hanging, outwards; at most 5.3, across the head
        angle = np.mod(np.arctan2(out * arm[:, 0], -arm[:, 1]) + 1, 2 * np.pi) - 1
        up = (body[f"{side}_wrist"] - body[f"{side}_shoulder"])[:, 1] > -0.05
        angle = np.where(up, np.maximum(angle, UP), UP)
        outs = _swings(angle, WAVE)[1::2]
        if len(_swings(angle, WAVE)) > 2:
            counts[side] = len(outs)
            # from out to in, either way in time
            once = [_swings(a, WAVE / 3)[1] for a in (angle[outs[0] :], angle[outs[0] :: -1])]
            seconds.append(
                ((outs[-1] - outs[0]) / (len(outs) - 1) if len(outs) > 1 else 2 * min(once)) / FPS
            )
    if not counts:
        return None
    if len(set(counts.values())) > 1:
        return Movement(fault=f"the hands wave differently: {counts}")
    expected = [moves_draw.PERIODS["waves"][s] / FPS for s in SPEEDS]
    side, count = next(iter(counts.items()))
    return _timed(
        "waves", np.mean(seconds), *expected, count=count, side="both" if len(counts) == 2 else side
    )


def _kicking(body: _Body) -> Movement | None:
    height = {side: body[f"{side}_ankle"][:, 1] for side in ("left", "right")}
    bouts = {side: _bouts(h, *KICK) for side, h in height.items()}
    sides = [s for s, b in bouts.items() if b]
    if not sides:
        return None
    if len(sides) > 1:
        return Movement(fault="the person kicks with both legs")
    return _repeated("kicks", height[sides[0]], bouts[sides[0]], side=sides[0])


def _sinking(body: _Body) -> Movement | None:
    depth = -body.rise
    bouts = _bouts(depth, *DIP)
    if not bouts:
        return None
    if bouts[-1][1] < len(depth):
        return _repeated("squats", depth, bouts)
    if len(bouts) > 1:
        return Movement(fault="the person squats and sits down")
    end = float(np.median(depth[bouts[0][0] + (len(depth) - bouts[0][0]) // 2 :]))
    seconds = _passes(depth, *(share * end for share in SWEEP)) / FPS
    return _timed("sits", seconds, *(_sweep(moves_draw.SIT[s]) for s in SPEEDS))


def _bowing(body: _Body) -> Movement | None:
    trunk = body.facing(body["neck"] - body["pelvis"])
    lean = np.arctan2(trunk[:, 2], trunk[:, 1])
    bouts = _bouts(lean, *BOW)
    return _repeated("bows", lean, bouts) if bouts else None


def _repeated(action: str, x: np.ndarray, bouts: list[tuple[int, int]], **attributes) -> Movement:
    """Count repetitions; each one is timed where it is above half of its height."""
    if bouts[-1][1] == len(x):
        return Movement(fault=f"the person {action} and does not come back")
    widths = []
    edges = [0, *((a[1] + b[0]) // 2 for a, b in pairwise(bouts)), len(x)]
    for (a, b), (begin, end) in zip(bouts, pairwise(edges), strict=True):
        widths.append(float((x[begin:end] > x[a:b].max() / 2).sum()))
    expected = [(moves_draw.active(action, s) / 2 + 1) / FPS for s in SPEEDS]
    return _timed(action, float(np.mean(widths)) / FPS, *expected, count=len(bouts), **attributes)


# --- Curves


def _bouts(x: np.ndarray, high: float, low: float) -> list[tuple[int, int]]:
    """Intervals in which a curve [T] goes above ``high`` until it is below ``low``: first frame and
    the frame after the last, T if it stays above.
    """
    out, begin = [], None
    for i, v in enumerate(x):
        if begin is None and v > high:
            begin = i
        elif begin is not None and v < low:
            out.append((begin, i))
            begin = None
    return [*out, (begin, len(x))] if begin is not None else out


def _swings(x: np.ndarray, least: float) -> list[int]:
    """Turning points of a curve [T] that rises and falls by at least ``least``; none if it never
    does.
    """
    turns, sign, far, low, high = [], 0, 0, 0, 0
    for i, v in enumerate(x):
        if not sign:
            high, low = i if v > x[high] else high, i if v < x[low] else low
            if x[high] - x[low] >= least:
                sign, far = (1 if high > low else -1), i
                turns.append(min(low, high))
        elif sign * (v - x[far]) > 0:
            far = i
        elif sign * (x[far] - v) >= least:
            turns.append(far)
            sign, far = -sign, i
    return [*turns, far] if sign else []


def _passes(x: np.ndarray, low: float, high: float) -> float:
    """Frames that a curve [T] takes from a level up to a higher one: from its last frame below the
    lower to its first above the higher.
    """
    end = int(np.argmax(x >= high))
    begin = end - int(np.argmax(x[: end + 1][::-1] < low))

    def share(i, level):
        # fraction of a frame after the level is passed
        return (x[i + 1] - level) / (x[i + 1] - x[i])

    return (
        end - share(end - 1, high) - (begin + 1 - share(begin, low))
        if end > 0 and x[begin] < low
        else 0.0
    )


def _even(x: np.ndarray, reach: int = 4) -> np.ndarray:
    """Mean over the frames around each: [T, ...] -> [T, ...]."""
    x = np.concatenate([np.repeat(x[:1], reach, 0), x, np.repeat(x[-1:], reach, 0)])
    return sum(x[i : i + len(x) - 2 * reach] for i in range(2 * reach + 1)) / (2 * reach + 1)


def _length(body: _Body) -> float:
    """Length of the pelvis's way in metres."""
    return float(np.linalg.norm(np.diff(_even(body.root[:, [0, 2]]), axis=0), axis=-1).sum())
