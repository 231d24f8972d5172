"""HumanML3D features of a motion: 263 numbers per frame, invariant to origin and heading.

With ``p`` the joint positions, ``yaw`` the heading of the pelvis and ``L = R_y(-yaw)``, which
rotates the world into the facing frame, a motion of T frames becomes T - 1 rows (a row needs the
following frame)::

    ROOT       4   -(yaw[t+1] - yaw[t]) / 2;  x and z of L[t+1] (p[t+1] - p[t]) of the pelvis;  its
               height
    RIC       63   L[t] (p[t] - (x, 0, z) of the pelvis) of joints 1 to 21
    ROTATIONS 126  first and second column of the local rotations of joints 1 to 21
    VELOCITY  66   L[t] (p[t+1] - p[t]) of all joints, metres per frame
    CONTACT    4   1 where left ankle, left foot, right ankle, right foot stand on the floor, else 0

The turn is stored as in HumanML3D: the arcsin of the quaternion's y, half an angle, of the rotation
*into* the facing frame, hence its sign. Recovery integrates: row t leads from frame t to frame t +
1, so the row of the last frame has no effect.

Two things differ from HumanML3D's own files. Its rotations turn the bone that leads to a joint and
come from inverse kinematics; these turn the bones that leave it (see ``skeleton``) and recover the
motion directly. Contacts also require a low joint.

Only the yaw of the pelvis is kept, so ``features`` refuses a pelvis that leans. Heading and origin
are dropped; ``start_of`` returns them. Layout and thresholds: Guo et al. 2022, "Generating Diverse
and Natural 3D Human Motions from Text".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gen.core.errors import GenError
from gen.media.motion.skeleton import (
    JOINTS,
    Motion,
    axis_rotation,
    from_six,
    joint,
    kinematics,
    six,
    yaw_of,
)

_N = len(JOINTS)
ROOT = slice(0, 4)
RIC = slice(ROOT.stop, ROOT.stop + 3 * (_N - 1))
ROTATIONS = slice(RIC.stop, RIC.stop + 6 * (_N - 1))
VELOCITY = slice(ROTATIONS.stop, ROTATIONS.stop + 3 * _N)
CONTACT = slice(VELOCITY.stop, VELOCITY.stop + 4)
WIDTH = CONTACT.stop  # 263

LEGS = tuple(
    joint(f"{side}_{part}")
    for part in ("hip", "knee", "ankle", "foot")
    for side in ("left", "right")
)
CONTACTS = tuple(
    joint(f"{side}_{part}") for side in ("left", "right") for part in ("ankle", "foot")
)
CONTACT_STEP = 0.002**0.5  # metres per frame: a faster joint is not in contact
# metres: twice the ankle's height in the rest pose, where a foot lies on the floor
CONTACT_HEIGHTS = (0.12, 0.06, 0.12, 0.06)
MAX_LEAN = 0.001  # degrees


def _lower() -> np.ndarray:
    """Mark the features of the lower body: bool [263]."""
    is_lower = np.zeros(WIDTH, bool)
    is_lower[ROOT] = is_lower[CONTACT] = True
    for part, size, first in ((RIC, 3, 1), (ROTATIONS, 6, 1), (VELOCITY, 3, 0)):
        is_lower[part].reshape(-1, size)[[j - first for j in LEGS]] = True
    is_lower[VELOCITY][:3] = True  # the root's
    return is_lower


LOWER = np.flatnonzero(_lower())  # int [107]: root, legs, contacts
UPPER = np.flatnonzero(~_lower())  # int [156]: spine, head, arms


def features(motion: Motion) -> np.ndarray:
    """Compute the features of a motion of T frames: float32 [T - 1, 263].

    Raises ``GenError`` for a single frame, and if the pelvis leans by more than ``MAX_LEAN``
    degrees, which features cannot represent.
    """
    if motion.frames < 2:
        raise GenError(
            "a motion of 1 frame has no features; expected at least 2, as each row needs the"
            " following frame"
        )
    pelvis = motion.rotations[:, 0]
    lean = np.degrees(np.arctan2(np.hypot(pelvis[:, 0, 1], pelvis[:, 2, 1]), pelvis[:, 1, 1]))
    if lean.max() > MAX_LEAN:
        raise GenError(
            f"the pelvis leans by {lean.max():.3g} degrees in frame {lean.argmax()}; these features"
            " keep its yaw alone. Put the lean into spine1 and the hips and leave the pelvis"
            " upright"
        )
    p, _ = kinematics(motion.root, motion.rotations)
    yaw = yaw_of(pelvis)
    local = axis_rotation("y", -yaw)
    half = np.arcsin(
        np.sin(np.diff(yaw) / 2) * np.sign(np.cos(np.diff(yaw) / 2))
    )  # the shorter way round
    step = np.diff(p, axis=0)
    height = p[:-1, CONTACTS, 1]
    parts = (
        -half[:, None],
        _turn(local[1:], step[:, :1])[:, 0, [0, 2]],
        p[:-1, 0, 1:2],
        _turn(local[:-1], (p - p[:, :1] * (1, 0, 1))[:-1, 1:]),
        six(motion.rotations[:-1, 1:]),
        _turn(local[:-1], step),
        (np.linalg.norm(step[:, CONTACTS], axis=-1) < CONTACT_STEP) & (height < CONTACT_HEIGHTS),
    )
    return np.concatenate([np.asarray(v, np.float32).reshape(len(step), -1) for v in parts], 1)


def start_of(motion: Motion) -> tuple[float, tuple[float, float]]:
    """Return what ``features`` drops: the heading of the first frame in radians from +z towards +x,
    and x and z of its pelvis in metres."""
    return float(yaw_of(motion.rotations[0, 0])), (
        float(motion.root[0, 0]),
        float(motion.root[0, 2]),
    )


def recover(
    features: np.ndarray, heading: float = 0.0, origin: tuple[float, float] = (0.0, 0.0)
) -> Motion:
    """Recover a motion of N frames from the root and ``ROTATIONS`` of features [N, 263].

    ``heading`` in radians and ``origin`` (x, z) in metres set the start. Bones keep their lengths
    for any features. Raises ``GenError`` for another shape, numbers that are not finite, and six
    numbers that are no rotation.
    """
    rows = _rows(features)
    yaw, root = _integrate(rows, heading, origin)
    local = from_six(rows[:, ROTATIONS].reshape(len(rows), _N - 1, 6))
    return Motion(root, np.concatenate([axis_rotation("y", yaw)[:, None], local], 1))


def recover_joints(
    features: np.ndarray, heading: float = 0.0, origin: tuple[float, float] = (0.0, 0.0)
) -> np.ndarray:
    """Recover joint positions float32 [N, 22, 3] in metres from the root and ``RIC`` of features
    [N, 263].

    For generated features they may stretch bones and differ from ``recover``. Raises ``GenError``
    as ``recover`` does.
    """
    rows = _rows(features)
    yaw, root = _integrate(rows, heading, origin)
    others = _turn(axis_rotation("y", yaw), rows[:, RIC].reshape(len(rows), _N - 1, 3)) + root[
        :, None
    ] * (1, 0, 1)
    return np.concatenate([root[:, None], others], 1).astype(np.float32)


def statistics(
    features: Sequence[np.ndarray], floor: float = 1e-3
) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and standard deviation of every dimension over all arrays [N, 263]: two float32
    [263].

    Deviations are at least ``floor``: normalising never divides by zero, and constant dimensions
    (such as the RIC of hips) stay nearly constant. HumanML3D averages deviations over each part of
    the layout; these are per dimension. Raises ``GenError`` for no rows.
    """
    if not len(features):
        raise GenError("statistics of no features; expected at least one array [frames, 263]")
    rows = np.concatenate([_rows(f) for f in features])
    return rows.mean(0).astype(np.float32), np.maximum(rows.std(0), floor).astype(np.float32)


def _turn(rotations: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Rotate points [T, n, 3] by one rotation per frame [T, 3, 3]."""
    return np.einsum("tij,tnj->tni", rotations, points)


def _integrate(
    rows: np.ndarray, heading: float, origin: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Integrate the root to yaw [N] and pelvis positions [N, 3]; row t leads to frame t + 1."""
    yaw = heading + np.concatenate([[0.0], np.cumsum(-2 * rows[:-1, 0])])
    step = np.zeros((len(rows), 3))
    step[1:, [0, 2]] = rows[:-1, 1:3]
    root = np.cumsum(_turn(axis_rotation("y", yaw), step[:, None])[:, 0], 0)
    root += np.array([origin[0], 0, origin[1]])
    root[:, 1] = rows[:, 3]
    return yaw, root


def _rows(features: np.ndarray) -> np.ndarray:
    """Convert features to float64 [N, 263]. Raises ``GenError`` for another shape and for NaN."""
    rows = np.asarray(features, np.float64)
    if rows.ndim != 2 or rows.shape[1] != WIDTH or not len(rows):
        raise GenError(
            f"motion features are {list(rows.shape)}; expected [frames, {WIDTH}] with at least one"
            " frame"
        )
    if not np.isfinite(rows).all():
        frame, dimension = np.argwhere(~np.isfinite(rows))[0]
        raise GenError(f"motion features are not finite in frame {frame}, dimension {dimension}")
    return rows
