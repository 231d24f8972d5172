"""Read and write motions as BVH files (Biovision hierarchy), the format of animation programs.

The writer stores gen's skeleton and the local rotations of a motion, without inverse kinematics.
Lengths are in metres and angles in degrees, with six digits each. The root has position channels,
and every joint the rotation channels Z, Y, X, which mean ``R = Rz Ry Rx``: the last channel applies
first to a column vector. Joints are written depth-first, as the format requires; the ends of head,
feet and wrists are End Sites, for programs that draw a bone there.

The reader accepts files of the same skeleton, with channels and siblings in any order, and files of
other skeletons (``gen.media.motion.retarget``), whose bones are laid on gen's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gen.core.errors import GenError, shown, unknown
from gen.media.bounds import require_bytes
from gen.media.containers import existing_file
from gen.media.motion.retarget import matched, retargeted
from gen.media.motion.skeleton import (
    FPS,
    JOINTS,
    OFFSETS,
    PARENTS,
    Motion,
    axis_rotation,
    to_euler_zyx,
)

MOST_JOINTS, DEEPEST = 1000, 200  # joints of a skeleton, and those of a chain
TOLERANCE = 1e-4  # metres between an offset of a file and that of the skeleton, in any direction
TIME_TOLERANCE = 1e-4  # seconds; files round 1/20 to few digits
POSITIONS = ("Xposition", "Yposition", "Zposition")
ROTATIONS = ("Zrotation", "Yrotation", "Xrotation")
_TOES, _FINGERS = (0, 0, 0.07), (0, -0.16, 0)  # metres
_ENDS = {
    "head": (0, 0.15, 0),
    "left_foot": _TOES,
    "right_foot": _TOES,
    "left_wrist": _FINGERS,
    "right_wrist": _FINGERS,
}
_CHILDREN = tuple(
    tuple(j for j, above in enumerate(PARENTS) if above == i) for i in range(len(JOINTS))
)


@dataclass(frozen=True)
class _Joint:
    """Joint of a file's skeleton."""

    name: str
    parent: str | None
    offset: np.ndarray
    channels: tuple[str, ...]


# --- Writing


def write_bvh(path: str | Path, motion: Motion) -> None:
    """Write a motion as a BVH file. The same motion gives the same bytes; joints are restored
    within 1e-5 m."""
    order: list[int] = []
    lines = [
        "HIERARCHY",
        *_hierarchy(0, order),
        "MOTION",
        f"Frames: {motion.frames}",
        f"Frame Time: {1 / FPS:.6f}",
    ]
    angles = np.degrees(to_euler_zyx(motion.rotations[:, order])).reshape(motion.frames, -1)
    for row in np.concatenate([motion.root, angles], 1).round(6) + 0.0:  # + 0.0: no "-0.000000"
        lines.append(" ".join(f"{v:.6f}" for v in row))
    Path(path).write_text("\n".join(lines) + "\n", encoding="ascii", newline="\n")


def _hierarchy(j: int, order: list[int], depth: int = 0) -> list[str]:
    """Format a joint and its descendants; appends their indices to ``order``."""
    order.append(j)
    channels = ROTATIONS if j else (*POSITIONS, *ROTATIONS)
    inside = [_offset(OFFSETS[j]), f"CHANNELS {len(channels)} {' '.join(channels)}"]
    for child in _CHILDREN[j]:
        inside += _hierarchy(child, order, depth + 1)
    if not _CHILDREN[j]:
        inside += ["End Site", "{", "  " + _offset(_ENDS[JOINTS[j]]), "}"]
    return [f"{'JOINT' if j else 'ROOT'} {JOINTS[j]}", "{", *("  " + line for line in inside), "}"]


def _offset(offset) -> str:
    return "OFFSET " + " ".join(f"{v:.6f}" for v in offset)


# --- Reading


def read_bvh(path: str | Path, names: Mapping[str, str] | None = None) -> Motion:
    """Read a BVH file of this skeleton, in metres, at ``FPS`` frames per second, or of another one
    in any unit at any rate.

    Args:
        path: the file.
        names: joint of the file for every joint of gen's; None finds it by the usual names.

    Raises:
        GenError: a file that is missing, no BVH or truncated, a skeleton whose joints are not
            known, a wrong number of frames, or NaN; of this skeleton, a deviating joint, other bone
            lengths, channels other than three rotations, or another frame time.
    """
    path = existing_file(path, "BVH file")
    where = f"BVH file {path}"
    require_bytes(where, path.stat().st_size, "a text")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise GenError(f"{where} is not text; expected a BVH file") from None
    except OSError as error:
        raise GenError(f"{where} cannot be read: {error.strerror}") from None
    if text.split(maxsplit=1)[:1] != ["HIERARCHY"]:
        raise GenError(f"{where} does not start with HIERARCHY; expected a BVH file")
    hierarchy, *motion = re.split(
        r"^[ \t]*MOTION[ \t]*$", text.replace("\r\n", "\n"), maxsplit=1, flags=re.MULTILINE
    )
    if not motion:
        raise GenError(f"{where} is cut off: it has no MOTION part")
    joints = _Hierarchy(hierarchy.split()[1:], where).joints
    is_own = names is None and any(j.name in JOINTS for j in joints)
    if is_own:
        _require_skeleton(joints, where)
    rows, seconds = _frames(motion[0], sum(len(j.channels) for j in joints), where)
    if is_own:
        _require_rate(seconds, where)
        return _motion(joints, rows)
    chosen = matched([j.name for j in joints], names, where)
    positions = _positions(joints, rows, where)
    return retargeted(np.stack([positions[chosen[j]] for j in JOINTS], 1), seconds, where)


class _Hierarchy:
    """Parser of the words of a hierarchy into ``joints``, in the order of the file."""

    def __init__(self, words: list[str], where: str) -> None:
        self.words, self.index, self.where = words, 0, where
        self.joints: list[_Joint] = []
        self.word("ROOT")
        self.joint(None, 1)
        if self.index < len(words):
            raise GenError(
                f"{where} has {shown(words[self.index])} after its skeleton; expected MOTION"
            )

    def next(self, expected: str) -> str:
        """Return the next word. Raises ``GenError`` at the end."""
        if self.index == len(self.words):
            raise GenError(f"{self.where} is cut off inside its skeleton; expected {expected}")
        self.index += 1
        return self.words[self.index - 1]

    def word(self, *expected: str) -> str:
        """Return the next word. Raises ``GenError`` unless it is one of ``expected``."""
        word = self.next(" or ".join(expected))
        if word not in expected:
            raise GenError(
                f"{self.where} has {shown(word)} in its skeleton; expected {' or '.join(expected)}"
            )
        return word

    def offset(self) -> np.ndarray:
        """Parse an offset [3] in metres."""
        self.word("OFFSET")
        words = [self.next("three numbers") for _ in range(3)]
        try:
            return np.array([float(w) for w in words])
        except ValueError:
            raise GenError(
                f"{self.where} has an OFFSET of {' '.join(words)}; expected three numbers"
            ) from None

    def joint(self, parent: str | None, depth: int) -> None:
        """Parse a joint and its descendants."""
        name = self.next("the name of a joint")
        if depth > DEEPEST or len(self.joints) == MOST_JOINTS:
            raise GenError(
                f"{self.where} has a skeleton of more than {MOST_JOINTS} joints, or {DEEPEST} in a"
                " chain; expected that of a person"
            )
        if name in [j.name for j in self.joints]:
            raise GenError(f"{self.where} has the joint {name} twice")
        self.word("{")
        offset = self.offset()
        self.word("CHANNELS")
        count = self.next("a number")
        if not re.fullmatch("[0-9]", count):
            raise GenError(
                f"{self.where} has {shown(count)} CHANNELS at {name}; expected {3 if parent else 6}"
            )
        self.joints.append(
            _Joint(name, parent, offset, tuple(self.next("a channel") for _ in range(int(count))))
        )
        while (word := self.word("JOINT", "End", "}")) != "}":
            if word == "JOINT":
                self.joint(name, depth + 1)
            else:
                self.word("Site")
                self.word("{")
                self.offset()
                self.word("}")


def _require_skeleton(joints: list[_Joint], where: str) -> None:
    """Raise ``GenError`` unless the joints are those of this skeleton."""
    by_name = {j.name: j for j in joints}
    for name in by_name:
        if name not in JOINTS:
            raise unknown("joint", name, JOINTS, where)
    for i, name in enumerate(JOINTS):
        if name not in by_name:
            raise GenError(
                f"{where} has no joint {name}; expected the {len(JOINTS)} joints of this skeleton"
            )
        joint, parent = by_name[name], JOINTS[PARENTS[i]] if i else None
        if joint.parent != parent:
            raise GenError(
                f"{where} hangs {name} on {joint.parent or 'nothing'}; expected"
                f" {parent or 'the root'}"
            )
        if not np.abs(joint.offset - OFFSETS[i]).max() <= TOLERANCE:

            def show(v):
                return " ".join(f"{x:g}" for x in v)

            raise GenError(
                f"{where} has {name} at the offset {show(joint.offset)}; expected"
                f" {show(OFFSETS[i])}, in metres. Only this skeleton with its own bone lengths is"
                " read"
            )
        if sorted(joint.channels) != sorted(ROTATIONS if i else (*POSITIONS, *ROTATIONS)):
            raise GenError(
                f"{where} has the channels {' '.join(joint.channels) or 'none'} at {name}; expected"
                " the three rotations about X, Y and Z in any"
                f" order{'' if i else ' and the three positions'}"
            )


def _require_rate(seconds: float, where: str) -> None:
    """Raise ``GenError`` for another frame time than that of gen's own files."""
    if not abs(seconds - 1 / FPS) <= TIME_TOLERANCE:
        raise GenError(
            f"{where} has a frame time of {seconds:g}, {1 / seconds:.4g} frames per second;"
            f" expected {1 / FPS:g}, {FPS} frames per second. Resample it first"
        )


def _frames(text: str, width: int, where: str) -> tuple[np.ndarray, float]:
    """Parse the numbers after MOTION: float64 [frames, width], and the seconds of a frame."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    stated = re.fullmatch(r"Frames:\s*([0-9]{1,9})", lines[0]) if lines else None
    seconds = re.fullmatch(r"Frame Time:\s*(\S+)", lines[1]) if len(lines) > 1 else None
    if not stated or not seconds:
        fault = (
            f"has {shown(lines[bool(stated)])} in its MOTION part"
            if len(lines) > bool(stated)
            else "is cut off in its MOTION part"
        )
        raise GenError(
            f"{where} {fault}; expected"
            f" {'Frame Time: and seconds' if stated else 'Frames: and a number'}"
        )
    try:
        time = float(seconds[1])
    except ValueError:
        time = float("nan")
    if not 0 < time < float("inf"):
        raise GenError(f"{where} has a frame time of {seconds[1]}; expected {1 / FPS:g}")
    rows, count = lines[2:], int(stated[1])
    if not count:
        raise GenError(f"{where} states no frames; expected at least one")
    for k, row in enumerate(rows):
        values = row.split()
        if len(values) != width:
            cut = " and may be cut off" if k == len(rows) - 1 else ""
            raise GenError(
                f"{where} has {len(values)} numbers in frame {k}; expected {width}, one per"
                f" channel{cut}"
            )
    if len(rows) < count:
        raise GenError(f"{where} is cut off: it states {count} frames and has {len(rows)}")
    if len(rows) > count:
        raise GenError(f"{where} states {count} frames and has {len(rows)}")
    if not text.endswith("\n"):  # a number that lost its last digits is still a number
        raise GenError(f"{where} is cut off: its last line does not end")
    try:
        out = np.array([[float(v) for v in row.split()] for row in rows])
    except ValueError as error:
        raise GenError(f"{where} has values that are not numbers in its frames ({error})") from None
    if not np.isfinite(out).all():
        raise GenError(
            f"{where} has NaN or infinity in frame {np.argwhere(~np.isfinite(out))[0][0]}; expected"
            " finite numbers"
        )
    return out, time


def _positions(joints: list[_Joint], rows: np.ndarray, where: str) -> dict[str, np.ndarray]:
    """Return the position [frames, 3] of every joint in the world, in the unit of the file.

    Positions among the channels of a joint stand for its offset.
    """
    columns = iter(rows.T)
    positions: dict[str, np.ndarray] = {}
    frames: dict[str, np.ndarray] = {}
    for joint in joints:
        local = np.tile(joint.offset, (len(rows), 1))
        turned = np.tile(np.eye(3), (len(rows), 1, 1))
        for channel in joint.channels:
            values = next(columns)
            if channel in POSITIONS:
                local[:, POSITIONS.index(channel)] = values
            elif channel in ROTATIONS:
                turned = turned @ axis_rotation(channel[0].lower(), np.radians(values))
            else:
                raise unknown(f"channel of {joint.name}", channel, (*POSITIONS, *ROTATIONS), where)
        if joint.parent is None:
            positions[joint.name], frames[joint.name] = local, turned
        else:
            above = frames[joint.parent]
            moved = (above @ local[..., None])[..., 0]
            positions[joint.name] = positions[joint.parent] + moved
            frames[joint.name] = above @ turned
    return positions


def _motion(joints: list[_Joint], rows: np.ndarray) -> Motion:
    """Convert channel values [frames, channels] to a motion."""
    root = np.zeros((len(rows), 3))
    rotations = np.tile(np.eye(3), (len(rows), len(JOINTS), 1, 1))
    channels = [(JOINTS.index(j.name), c) for j in joints for c in j.channels]
    for (j, channel), values in zip(channels, rows.T, strict=True):
        if channel in POSITIONS:
            root[:, POSITIONS.index(channel)] = values
        else:
            rotations[:, j] = rotations[:, j] @ axis_rotation(
                channel[0].lower(), np.radians(values)
            )
    return Motion(root, rotations)
