"""Human skeleton of 22 joints, with rotations and forward kinematics.

Joints and their order are those of HumanML3D, the first 22 of SMPL; the bones are gen's own, an
adult of about 1.7 metres. Units are metres and radians. The frame is right-handed with y up; the
figure faces +z and its left is +x.

The rest pose is a relaxed standing figure: legs and arms hang straight down (no T-pose), so zero
rotations stand still. With ``R_j`` the frame of joint ``j`` in its parent's frame, ``o_j`` its
offset there and ``G`` the frames in the world::

    G_0 = R_0          p_0 = root
    G_j = G_parent R_j          p_j = p_parent + G_parent o_j

so ``R_j`` rotates the bones that leave joint ``j``, as in SMPL and BVH. The rotation of a joint
without children moves no joint.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from gen.core.errors import GenError, bad_value, unknown

FPS = 20
_BONES = (  # joint, parent, offset in the parent's frame in metres
    ("pelvis", None, (0.0, 0.0, 0.0)),
    ("left_hip", "pelvis", (0.09, -0.07, 0.0)),
    ("right_hip", "pelvis", (-0.09, -0.07, 0.0)),
    ("spine1", "pelvis", (0.0, 0.11, -0.01)),
    ("left_knee", "left_hip", (0.0, -0.40, 0.0)),
    ("right_knee", "right_hip", (0.0, -0.40, 0.0)),
    ("spine2", "spine1", (0.0, 0.13, 0.0)),
    ("left_ankle", "left_knee", (0.0, -0.40, 0.0)),
    ("right_ankle", "right_knee", (0.0, -0.40, 0.0)),
    ("spine3", "spine2", (0.0, 0.07, 0.0)),
    ("left_foot", "left_ankle", (0.0, -0.06, 0.13)),
    ("right_foot", "right_ankle", (0.0, -0.06, 0.13)),
    ("neck", "spine3", (0.0, 0.20, 0.0)),
    ("left_collar", "spine3", (0.07, 0.12, 0.0)),
    ("right_collar", "spine3", (-0.07, 0.12, 0.0)),
    ("head", "neck", (0.0, 0.12, 0.02)),
    ("left_shoulder", "left_collar", (0.11, 0.02, 0.0)),
    ("right_shoulder", "right_collar", (-0.11, 0.02, 0.0)),
    ("left_elbow", "left_shoulder", (0.0, -0.28, 0.0)),
    ("right_elbow", "right_shoulder", (0.0, -0.28, 0.0)),
    ("left_wrist", "left_elbow", (0.0, -0.25, 0.0)),
    ("right_wrist", "right_elbow", (0.0, -0.25, 0.0)),
)
JOINTS = tuple(name for name, _, _ in _BONES)
# the pelvis has no parent: -1
PARENTS = tuple(-1 if parent is None else JOINTS.index(parent) for _, parent, _ in _BONES)
OFFSETS = np.array([offset for _, _, offset in _BONES])  # float64 [22, 3]
OFFSETS.setflags(write=False)
_LEG = [JOINTS.index(n) for n in ("left_hip", "left_knee", "left_ankle", "left_foot")]
STANDING = -float(OFFSETS[_LEG, 1].sum())  # height of the pelvis in metres
TOLERANCE = 1e-4  # of ``R'R`` from the identity, in any entry


def joint(name: str) -> int:
    """Return the index of a joint. Raises ``GenError`` naming the nearest joint."""
    if name not in JOINTS:
        raise unknown("joint", name, JOINTS)
    return JOINTS.index(name)


@dataclass(frozen=True, eq=False)
class Motion:
    """Motion of a person at ``FPS`` frames per second.

    ``root``: positions of the pelvis in metres, [T, 3]. ``rotations``: local rotations [T, 22, 3,
    3]; ``rotations[:, 0]`` is the pelvis in the world. Both are stored as read-only float64 copies.
    Raises ``GenError`` for another shape, no frame, values that are not finite, or a matrix that is
    no rotation (``TOLERANCE``).
    """

    root: np.ndarray
    rotations: np.ndarray

    def __post_init__(self) -> None:
        for name in ("root", "rotations"):
            try:
                value = np.array(getattr(self, name), np.float64)
            except (TypeError, ValueError):
                raise GenError(f"the {name} of a motion must be an array of real numbers") from None
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        frames = len(self.root) if self.root.ndim else 0
        if self.root.ndim != 2 or self.root.shape[1] != 3 or not frames:
            raise GenError(
                f"the root of a motion is {list(self.root.shape)}; expected [frames, 3] with at"
                " least one frame"
            )
        expected = (frames, len(JOINTS), 3, 3)
        if self.rotations.shape != expected:
            raise GenError(
                f"the rotations of a motion are {list(self.rotations.shape)}; expected"
                f" {list(expected)}"
            )
        for name, value in (("root", self.root), ("rotations", self.rotations)):
            if not np.isfinite(value).all():
                index = np.argwhere(~np.isfinite(value))[0]
                where = f"frame {index[0]}" + (
                    f", joint {JOINTS[index[1]]}" if name == "rotations" else ""
                )
                raise GenError(f"the {name} of a motion are not finite at {where}")
        _require_rotations(self.rotations)

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.root)

    @functools.cached_property
    def joints(self) -> np.ndarray:
        """Joint positions in the world in metres: float32 [T, 22, 3]."""
        out = kinematics(self.root, self.rotations)[0].astype(np.float32)
        out.setflags(write=False)
        return out

    def cut(self, start: int, stop: int | None = None) -> Motion:
        """Return frames ``start`` to ``stop`` (exclusive; None: the end). Raises ``GenError``
        unless ``0 <= start < stop <= frames``."""
        stop = self.frames if stop is None else stop
        if not 0 <= start < stop <= self.frames:
            raise GenError(
                f"cannot cut frames {start} to {stop} of a motion of {self.frames}; expected 0 <="
                f" start < stop <= {self.frames}"
            )
        return Motion(self.root[start:stop], self.rotations[start:stop])


def _require_rotations(rotations: np.ndarray) -> None:
    """Raise ``GenError`` for the first matrix of [T, 22, 3, 3] that is no rotation."""
    error = np.abs(np.swapaxes(rotations, -1, -2) @ rotations - np.eye(3)).max((-1, -2))
    mirrored = np.linalg.det(rotations) < 0
    bad = np.argwhere((error > TOLERANCE) | mirrored)
    if len(bad):
        frame, j = bad[0]
        fault = (
            "mirrors" if mirrored[frame, j] else f"is {error[frame, j]:.2g} away from orthonormal"
        )
        raise GenError(
            f"the matrix of {JOINTS[j]} in frame {frame} is not a rotation: it {fault}; expected at"
            f" most {TOLERANCE:g} and no mirror"
        )


def standing(frames: int) -> Motion:
    """Return a motion of the rest pose, standing at the origin and facing +z."""
    if frames < 1:
        raise bad_value("frames", frames, "at least 1")
    return Motion(
        np.tile([0.0, STANDING, 0.0], (frames, 1)), np.tile(np.eye(3), (frames, len(JOINTS), 1, 1))
    )


def kinematics(root: np.ndarray, rotations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute forward kinematics.

    Args:
        root: Positions of the pelvis [..., 3] in metres.
        rotations: Local rotations [..., 22, 3, 3].

    Returns:
        Positions [..., 22, 3] and frames [..., 22, 3, 3] of all joints in the world, float64.
    """
    positions, frames = (
        [np.asarray(root, np.float64)],
        [np.asarray(rotations, np.float64)[..., 0, :, :]],
    )
    for j in range(1, len(JOINTS)):
        above = PARENTS[j]
        positions.append(positions[above] + frames[above] @ OFFSETS[j])
        frames.append(frames[above] @ rotations[..., j, :, :])
    return np.stack(positions, -2), np.stack(frames, -3)


# --- Rotations


def axis_rotation(axis: str | np.ndarray, angle: np.ndarray | float) -> np.ndarray:
    """Build right-handed rotations float64 [..., 3, 3] by ``angle`` radians [...] about one axis,
    "x", "y", "z" or a vector [3].

    Rodrigues: ``R = I + sin(a) K + (1 - cos(a)) K K`` with ``K v = axis x v``. Raises ``GenError``
    for another axis or one of length zero.
    """
    if isinstance(axis, str):
        if axis not in ("x", "y", "z"):
            raise bad_value("axis", axis, "x, y, z or a vector of three numbers")
        axis = np.eye(3)["xyz".index(axis)]
    axis = np.asarray(axis, np.float64)
    length = np.linalg.norm(axis)
    if axis.shape != (3,) or not np.isfinite(length) or length < 1e-12:
        raise bad_value(
            "axis", axis.tolist(), "x, y, z or a vector of three numbers that are not all zero"
        )
    x, y, z = axis / length
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = np.asarray(angle, np.float64)[..., None, None]
    return np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * (k @ k)


def euler_zyx(angles: np.ndarray) -> np.ndarray:
    """Convert angles (z, y, x) in radians [..., 3] to ``Rz Ry Rx``, float64 [..., 3, 3]."""
    z, y, x = np.moveaxis(np.asarray(angles, np.float64), -1, 0)
    return axis_rotation("z", z) @ axis_rotation("y", y) @ axis_rotation("x", x)


def to_euler_zyx(rotation: np.ndarray) -> np.ndarray:
    """Invert ``euler_zyx``: [..., 3, 3] -> (z, y, x) in radians, float64 [..., 3], with y within a
    quarter turn.

    x is computed after undoing z, so the angles restore the rotation even in gimbal lock, where y
    is a quarter turn.
    """
    r = np.asarray(rotation, np.float64)
    z = np.arctan2(r[..., 1, 0], r[..., 0, 0])
    y = np.arctan2(-r[..., 2, 0], np.hypot(r[..., 0, 0], r[..., 1, 0]))
    s, c = np.sin(z), np.cos(z)
    x = np.arctan2(s * r[..., 0, 2] - c * r[..., 1, 2], c * r[..., 1, 1] - s * r[..., 0, 1])
    return np.stack([z, y, x], -1)


def six(rotation: np.ndarray) -> np.ndarray:
    """Convert rotations [..., 3, 3] to the continuous 6D representation [..., 6], their first two
    columns (Zhou et al. 2019, arXiv:1812.07035)."""
    return np.concatenate([rotation[..., 0], rotation[..., 1]], -1)


def from_six(numbers: np.ndarray) -> np.ndarray:
    """Convert the 6D representation [..., 6] to rotations float64 [..., 3, 3], by Gram-Schmidt.

    Raises ``GenError`` for a column of length zero and for two parallel columns.
    """
    numbers = np.asarray(numbers, np.float64)
    if numbers.shape[-1:] != (6,):
        raise GenError(f"six numbers of a rotation are {list(numbers.shape)}; expected [..., 6]")
    first, second = numbers[..., :3], numbers[..., 3:]
    x = _unit(first)
    y = _unit(second - (x * second).sum(-1, keepdims=True) * x)
    return np.stack([x, y, np.cross(x, y)], -1)


def _unit(vector: np.ndarray) -> np.ndarray:
    """Normalise vectors [..., 3]. Raises ``GenError`` for a length of zero."""
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    if not (np.isfinite(length) & (length > 1e-8)).all():
        raise GenError(
            "the six numbers of a rotation do not span a plane; expected two finite columns"
            " that are not parallel"
        )
    return vector / length


def yaw_of(rotation: np.ndarray) -> np.ndarray:
    """Return the heading [...] of frames [..., 3, 3]: radians from +z towards +x, seen from above.

    It is the angle of ``axis_rotation("y", angle)``; a frame that faces straight up or down has
    heading 0.
    """
    return np.arctan2(rotation[..., 0, 2], rotation[..., 2, 2])
