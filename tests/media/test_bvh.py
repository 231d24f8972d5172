"""BVH files: what is written comes back, an independent reader sees the same joints, and everything
else is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.media.motion.bvh import read_bvh, write_bvh
from gen.media.motion.skeleton import JOINTS, Motion, euler_zyx


def anyhow(seed: int, frames: int = 12) -> Motion:
    """Joints and pelvis turned at random, some of them to where two Euler axes coincide."""
    rng = np.random.default_rng(seed)
    angles = rng.uniform(-3, 3, (frames, len(JOINTS), 3))
    angles[::2, :, 1] = math.pi / 2
    return Motion(rng.normal(size=(frames, 3)) * 3, euler_zyx(angles))


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.fixture(scope="module")
def motion() -> Motion:
    return anyhow(0)


@pytest.fixture(scope="module")
def text(motion: Motion, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("bvh") / "a.bvh"
    write_bvh(path, motion)
    return path.read_text()


def read(tmp_path: Path, text: str | bytes) -> Motion:
    path = tmp_path / "b.bvh"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_bvh(path)


def hierarchy(lines: list[list[str]]) -> tuple[list[dict], int]:
    """Joints of a BVH text in its order, and the line at which the frames begin."""
    stack: list[dict] = []
    joints: list[dict] = []
    for n, words in enumerate(lines):
        if words[0] in ("ROOT", "JOINT", "End"):
            new = {
                "name": words[1],
                "parent": stack[-1] if stack else None,
                "channels": [],
                "end": words[0] == "End",
            }
        elif words[0] == "{":
            stack.append(new)
            if not new["end"]:
                joints.append(new)
        elif words[0] == "OFFSET":
            stack[-1]["offset"] = [float(w) for w in words[1:]]
        elif words[0] == "CHANNELS":
            stack[-1]["channels"] = words[2:]
        elif words[0] == "}":
            stack.pop()
        elif words[0] == "Frame":
            return joints, n + 1
    raise ValueError("a BVH text without frames")


def about(axis: str, degrees: float) -> list[list[float]]:
    """The rotation matrix about one axis."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return {
        "X": [[1, 0, 0], [0, c, -s], [0, s, c]],
        "Y": [[c, 0, s], [0, 1, 0], [-s, 0, c]],
        "Z": [[c, -s, 0], [s, c, 0], [0, 0, 1]],
    }[axis]


def product(a, b):
    """The product of two matrices [3, 3]."""
    return [[sum(a[i][k] * b[k][j] for k in range(3)) for j in range(3)] for i in range(3)]


def independent(text: str, wrong_order: bool = False) -> dict[str, np.ndarray]:
    """Joint positions [T, 3] by name from a BVH text, by lines and a stack, with scalar
    trigonometry."""
    lines = [line.split() for line in text.splitlines()]
    joints, start = hierarchy(lines)
    out: dict[str, list] = {j["name"]: [] for j in joints}
    for words in lines[start:]:
        values = iter(map(float, words))
        for j in joints:
            position, turn = list(j["offset"]), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
            for channel in j["channels"]:
                value = next(values)
                if channel.endswith("position"):
                    position["XYZ".index(channel[0])] += value
                else:
                    turn = (
                        product(about(channel[0], value), turn)
                        if wrong_order
                        else product(turn, about(channel[0], value))
                    )
            above = j["parent"]
            j["turn"], j["at"] = turn, position
            if above:
                j["turn"] = product(above["turn"], turn)
                j["at"] = [
                    a + sum(r * o for r, o in zip(row, position, strict=True))
                    for a, row in zip(above["at"], above["turn"], strict=True)
                ]
            out[j["name"]].append(j["at"])
    return {name: np.array(v) for name, v in out.items()}


# --- Round trips


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_comes_back(tmp_path: Path, seed: int):
    motion = anyhow(seed, 40)
    write_bvh(tmp_path / "a.bvh", motion)
    back = read_bvh(tmp_path / "a.bvh")
    assert back.frames == 40 and error(back.joints, motion.joints) < 1e-5
    assert error(back.rotations, motion.rotations) < 1e-6 and error(back.root, motion.root) < 1e-6


def test_an_independent_reader_sees_the_same_joints(motion: Motion, text: str):
    seen = independent(text)
    assert sorted(seen) == sorted(JOINTS)
    assert error(np.stack([seen[n] for n in JOINTS], 1), motion.joints) < 1e-5
    wrong = independent(text, wrong_order=True)
    assert error(np.stack([wrong[n] for n in JOINTS], 1), motion.joints) > 0.1


def test_a_wrong_order_of_the_angles_does_not_give_the_motion_back(
    tmp_path: Path, motion: Motion, text: str
):
    turned = read(
        tmp_path, text.replace("Zrotation Yrotation Xrotation", "Xrotation Yrotation Zrotation")
    )
    assert error(turned.joints, motion.joints) > 0.1


def test_the_same_motion_makes_the_same_bytes_and_reading_and_writing_is_stable(
    tmp_path: Path, motion: Motion, text: str
):
    write_bvh(tmp_path / "a.bvh", motion)
    assert (tmp_path / "a.bvh").read_text() == text
    write_bvh(tmp_path / "c.bvh", read_bvh(tmp_path / "a.bvh"))
    assert error(read_bvh(tmp_path / "c.bvh").joints, motion.joints) < 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_channels_in_any_order_mean_what_an_independent_reader_says(
    tmp_path: Path, motion: Motion, text: str, seed: int
):
    """The angles stay, so with other channels they are another motion; every joint has its own
    order."""
    rng = np.random.default_rng(seed)
    shuffled = re.sub(
        r"(CHANNELS [36]) (.*)", lambda m: f"{m[1]} {' '.join(rng.permutation(m[2].split()))}", text
    )
    seen = independent(shuffled)
    back = read(tmp_path, shuffled)
    assert (
        error(back.joints, np.stack([seen[n] for n in JOINTS], 1)) < 1e-4
    )  # positions are now up to 180 metres
    assert error(back.joints, motion.joints) > 1


def test_siblings_may_stand_in_any_order_and_lines_end_in_any_way(tmp_path: Path):
    """A resting figure's columns are all zero but the root's, so exchanged legs change nothing;
    their names say which is which."""
    write_bvh(tmp_path / "a.bvh", Motion(np.ones((3, 3)), np.tile(np.eye(3), (3, 22, 1, 1))))
    text = (tmp_path / "a.bvh").read_text()
    left, right = text.index("  JOINT left_hip"), text.index("  JOINT right_hip")
    end = text.index("  JOINT spine1")
    swapped = text[:left] + text[right:end] + text[left:right] + text[end:]
    assert swapped.index("right_hip") < swapped.index("left_hip")
    expected = read_bvh(tmp_path / "a.bvh").joints
    assert np.array_equal(read(tmp_path, swapped).joints, expected)
    assert np.array_equal(
        read(tmp_path, text.replace("\n", "\r\n").replace("  ", "\t")).joints, expected
    )


# --- Refusals


def without_two_frames(text: str) -> str:
    return "\n".join(text.splitlines()[:-2]) + "\n"


def ending_in(text: str, word: str) -> str:
    """With another last number."""
    return f"{text[: text.rindex(' ')]} {word}\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: "", "does not start with HIERARCHY"),
        (lambda t: "a walk", "expected a BVH file"),
        (lambda t: b"\x89PNG\xff\xfe\x00", "is not text"),
        (lambda t: t[: t.index("right_knee")], "is cut off: it has no MOTION"),
        (lambda t: t[: t.index("MOTION")], "is cut off: it has no MOTION"),
        (lambda t: t[: t.index("Frames")], "is cut off in its MOTION part; expected Frames"),
        (
            lambda t: t[: t.index("Frame Time")],
            "is cut off in its MOTION part; expected Frame Time",
        ),
        (without_two_frames, "is cut off: it states 12 frames and has 10"),
        (
            lambda t: t[:-200],
            "numbers in frame 11; expected 69, one per channel and may be cut off",
        ),
        (lambda t: t[:-3], "its last line does not end"),
        (lambda t: t + t.splitlines()[-1] + "\n", "states 12 frames and has 13"),
        (lambda t: t.replace("Frames: 12", "Frames: 0"), "states no frames"),
        (
            lambda t: t.replace("Frames: 12", "Frames: twelve"),
            "'Frames: twelve'.*expected Frames: and a number",
        ),
        (
            lambda t: t.replace("Frame Time: 0.050000", "Frame Time: 0.033333"),
            r"0\.033333, 30 frames per second; expected 0\.05, 20 frames",
        ),
        (
            lambda t: t.replace("Frame Time: 0.050000", "Frame Time: 0"),
            r"frame time of 0; expected 0\.05",
        ),
        (lambda t: t.replace("Frame Time: 0.050000", "Frame Time: nan"), "frame time of nan"),
        (lambda t: t.replace("left_knee", "LeftLeg"), "unknown joint 'LeftLeg'"),
        (lambda t: t.replace("left_knee", "left_kne"), "Did you mean 'left_knee'"),
        (lambda t: t.replace("JOINT right_wrist", "JOINT left_wrist"), "joint left_wrist twice"),
        (
            lambda t: (
                t.replace("left_collar", "?")
                .replace("left_hip", "left_collar")
                .replace("?", "left_hip")
            ),
            "hangs left_hip on spine3; expected pelvis",
        ),
        (
            lambda t: t.replace("-0.400000", "-0.410000", 1),
            r"left_knee at the offset 0 -0\.41 0; expected 0 -0\.4 0",
        ),
        (lambda t: t.replace("-0.400000", "-0.400200", 1), "left_knee at the offset"),
        (lambda t: t.replace("OFFSET 0.090000", "OFFSET nan"), "left_hip at the offset nan"),
        (lambda t: t.replace("OFFSET 0.090000", "OFFSET wide"), "OFFSET of wide"),
        (
            lambda t: t.replace("OFFSET 0.000000 0.000000 0.000000", "OFFSET 0 0.9 0", 1),
            r"pelvis at the offset 0 0\.9 0",
        ),
        (
            lambda t: t.replace(
                "3 Zrotation Yrotation Xrotation", "3 Zrotation Yrotation Zrotation", 1
            ),
            "Zrotation Yrotation Zrotation at left_hip",
        ),
        (
            lambda t: t.replace("3 Zrotation Yrotation Xrotation", "2 Zrotation Yrotation", 1),
            "channels Zrotation Yrotation at left_hip",
        ),
        (
            lambda t: t.replace("CHANNELS 6 Xposition Yposition Zposition", "CHANNELS 3", 1),
            "at pelvis; expected.*and the three positions",
        ),
        (lambda t: t.replace("CHANNELS 3", "CHANNELS three", 1), "'three' CHANNELS"),
        (lambda t: t.replace("End Site", "Start Site", 1), "'Start' in its skeleton"),
        (lambda t: t.replace("MOTION", "}\nMOTION"), "has '}' after"),
        (lambda t: ending_in(t, "nan"), "NaN or infinity in frame 11"),
        (lambda t: ending_in(t, "-inf"), "NaN or infinity in frame 11"),
        (lambda t: ending_in(t, "far"), "values that are not numbers"),
    ],
)
def test_a_file_that_is_not_this_is_refused_in_one_line(
    tmp_path: Path, text: str, change, says: str
):
    changed = change(text)
    assert changed != text
    with pytest.raises(GenError, match=says) as raised:
        read(tmp_path, changed)
    assert "\n" not in str(raised.value) and "b.bvh" in str(raised.value)


def test_small_differences_of_offsets_and_frame_time_are_rounding(
    tmp_path: Path, motion: Motion, text: str
):
    near = text.replace("-0.400000", "-0.400050").replace("Frame Time: 0.050000", "Frame Time: .05")
    assert near != text and error(read(tmp_path, near).joints, motion.joints) < 1e-5


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    for path, said in ((tmp_path / "none.bvh", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(GenError, match=f"{said}; expected a file"):
            read_bvh(path)


def test_no_cut_of_a_file_goes_unseen(tmp_path: Path, text: str):
    for at in np.linspace(0, len(text) - 1, 150).astype(int):
        with pytest.raises(GenError):
            read(tmp_path, text[:at])
    assert read(tmp_path, text).frames == 12
