"""Motions of other skeletons, laid on gen's: those of Mixamo, CMU and Blender's Rigify, or any
whose joints a file names.

The positions of the 22 joints are computed on the skeleton that they come from, resampled to gen's
frame rate and scaled to the length of gen's legs. Every bone of gen's then points as that of the
other skeleton; where several bones leave a joint, its rotation is the one that fits them best
(Kabsch). The pelvis stays upright, as the features of motions want it, and bends where legs and
spine begin. Twists of a bone about itself are those of the bone above it: positions do not show
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from gen.core.errors import GenError, cut_list, unknown
from gen.media.bounds import MOST_FRAMES
from gen.media.motion.skeleton import (
    FPS,
    JOINTS,
    OFFSETS,
    PARENTS,
    Motion,
    axis_rotation,
    yaw_of,
)

_SIDED = ("hip", "knee", "ankle", "foot", "collar", "shoulder", "elbow", "wrist")
_MIDDLE = ("pelvis", "spine1", "spine2", "spine3", "neck", "head")


def _named(middle: str, sided: str, left: str, right: str) -> dict[str, str]:
    """Return the name of every joint, from those of the middle and of one side."""
    found = dict(zip(_MIDDLE, middle.split(), strict=True))
    for name, pattern in zip(_SIDED, sided.split(), strict=True):
        found[f"left_{name}"] = pattern.replace("*", left)
        found[f"right_{name}"] = pattern.replace("*", right)
    return found


KNOWN: dict[str, dict[str, str]] = {
    "Mixamo": _named(
        "Hips Spine Spine1 Spine2 Neck Head",
        "*UpLeg *Leg *Foot *ToeBase *Shoulder *Arm *ForeArm *Hand",
        "Left",
        "Right",
    ),
    "CMU": _named(
        "Hips LowerBack Spine Spine1 Neck1 Head",
        "*UpLeg *Leg *Foot *ToeBase *Shoulder *Arm *ForeArm *Hand",
        "Left",
        "Right",
    ),
    "Blender": _named(
        "spine spine.001 spine.002 spine.003 spine.004 spine.006",
        "thigh.* shin.* foot.* toe.* shoulder.* upper_arm.* forearm.* hand.*",
        "L",
        "R",
    ),
}
CHILDREN = tuple([j for j, above in enumerate(PARENTS) if above == i] for i in range(len(JOINTS)))


def plain(name: str) -> str:
    """Return a joint's name without the name space before it, such as ``mixamorig:``."""
    return name.rpartition(":")[2].removeprefix("mixamorig")


def matched(names: Iterable[str], given: Mapping[str, str] | None, where: str) -> dict[str, str]:
    """Return the joint of a file for every joint of gen's.

    Args:
        names: joints of the file.
        given: joint of the file by that of gen; None finds it among the known skeletons.
        where: name of the file, for messages.

    Raises:
        GenError: a name that is not there, or a skeleton that is none of the known ones.
    """
    own = {plain(name): name for name in names}
    if given is not None:
        for joint in given:
            if joint not in JOINTS:
                raise unknown("joint", joint, JOINTS, "the names of a skeleton")
        for joint in JOINTS:
            named = given.get(joint)
            if named not in own.values():
                raise unknown(f"joint for {joint}", str(named), [*own.values()], where)
        return {joint: given[joint] for joint in JOINTS}
    for wanted in KNOWN.values():
        if all(name in own for name in wanted.values()):
            return {joint: own[name] for joint, name in wanted.items()}
    missing = {kind: [n for n in wanted.values() if n not in own] for kind, wanted in KNOWN.items()}
    nearest = min(missing, key=lambda kind: len(missing[kind]))
    raise GenError(
        f"{where} has the joints {', '.join(cut_list([*own.values()], 6))}; expected those of gen's"
        f" skeleton, or of {', '.join(KNOWN)} (of {nearest} it lacks"
        f" {', '.join(cut_list(missing[nearest], 4))}), or a file that names them"
    )


def retargeted(positions: np.ndarray, seconds: float, where: str) -> Motion:
    """Return the motion of gen's skeleton whose bones point as those of another one.

    Args:
        positions: positions of the 22 joints in any unit, float [T, 22, 3], y up.
        seconds: time of a frame.
        where: name of the file, for messages.

    Raises:
        GenError: bones without a length, in all frames or in one, or with an endless one; or more
            than ``MOST_FRAMES`` frames at gen's rate.
    """
    lengths = _lengths(positions).mean(1)
    for joint, length in zip(JOINTS[1:], lengths, strict=True):
        if not 1e-6 < length < np.inf:
            raise GenError(f"{where} has no bone before {joint}; expected one of some length")
    if (len(positions) - 1) * seconds * FPS > MOST_FRAMES:
        raise GenError(
            f"{where} lasts {(len(positions) - 1) * seconds:g} seconds; expected at most"
            f" {MOST_FRAMES / FPS:g}"
        )
    legs = [JOINTS.index(f"{side}_{n}") for side in ("left", "right") for n in ("knee", "ankle")]
    own = np.linalg.norm(OFFSETS[legs], axis=1).sum()
    scaled = resampled(positions, seconds) * own / lengths[np.array(legs) - 1].sum()
    shortest = _lengths(scaled).min(1)
    if not (shortest > 1e-6).all():
        joint = JOINTS[1 + int(shortest.argmin())]
        raise GenError(f"{where} has a frame without the bone before {joint}; expected all bones")
    frames = [_frame(0, scaled, np.tile(np.eye(3), (len(scaled), 1, 1)))]
    rotations = [frames[0]]
    for j in range(1, len(JOINTS)):
        above = frames[PARENTS[j]]
        frames.append(_frame(j, scaled, above))
        rotations.append(np.swapaxes(above, -1, -2) @ frames[j])
    return Motion(scaled[:, 0], np.stack(rotations, 1))


def _lengths(positions: np.ndarray) -> np.ndarray:
    """Return the lengths [21, T] of the bones that end in all joints but the first."""
    bones = np.array([positions[:, j] - positions[:, PARENTS[j]] for j in range(1, len(JOINTS))])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.linalg.norm(bones, axis=-1)


def resampled(values: np.ndarray, seconds: float) -> np.ndarray:
    """Return values [T, ...] at gen's frame rate, interpolated linearly."""
    count = int((len(values) - 1) * seconds * FPS + 0.01) + 1  # files round the time of a frame
    at = np.arange(count) / (FPS * seconds)
    low = np.minimum(at.astype(int), len(values) - 1)
    high = np.minimum(low + 1, len(values) - 1)
    share = (at - low).reshape(-1, *[1] * (values.ndim - 1))
    return values[low] * (1 - share) + values[high] * share


def _frame(j: int, positions: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the frames [T, 3, 3] of a joint in the world, given those of its parent."""
    children = CHILDREN[j]
    if not children:
        return above
    ours = OFFSETS[children] / np.linalg.norm(OFFSETS[children], axis=1, keepdims=True)
    theirs = positions[:, children] - positions[:, j, None]
    theirs = theirs / np.linalg.norm(theirs, axis=-1, keepdims=True)
    if len(children) > 1:
        turned = _kabsch(np.broadcast_to(ours, theirs.shape), theirs)
        return turned if j else axis_rotation("y", yaw_of(turned))
    return _turn(above @ ours[0], theirs[:, 0]) @ above


def _kabsch(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the rotations [T, 3, 3] that turn vectors a [T, n, 3] to b best."""
    u, _, vt = np.linalg.svd(np.swapaxes(b, -1, -2) @ a)
    sign = np.ones((len(a), 3))
    sign[:, 2] = np.linalg.det(u @ vt)
    return (u * sign[:, None]) @ vt


def _turn(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the smallest rotations [T, 3, 3] that turn unit vectors a [T, 3] to b."""
    cross, cosine = np.cross(a, b), (a * b).sum(-1)[:, None, None]
    x, y, z = np.moveaxis(cross, -1, 0)
    zero = np.zeros_like(x)
    k = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(-1, 3, 3)
    made = np.eye(3) + k + k @ k / np.maximum(1 + cosine, 1e-9)
    opposite = cosine[:, 0, 0] < -1 + 1e-6  # a half turn about any axis across
    if opposite.any():
        axis = np.cross(a[opposite], np.eye(3)[np.abs(a[opposite]).argmin(1)])
        axis /= np.linalg.norm(axis, axis=1, keepdims=True)
        made[opposite] = 2 * axis[:, :, None] * axis[:, None] - np.eye(3)
    return made
