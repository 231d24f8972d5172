"""Motions of other skeletons move the same bones the same way on gen's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gen.__main__ import main
from gen.core.errors import GenError
from gen.media.motion.bvh import read_bvh, write_bvh
from gen.media.motion.retarget import KNOWN, _turn
from gen.media.motion.skeleton import FPS, JOINTS, PARENTS, STANDING, Motion, axis_rotation
from gen.training.data import load_data


def moving(frames: int, seed: int = 0, leans: bool = False) -> Motion:
    """Return a motion in which all joints turn smoothly, the pelvis about the vertical."""
    rng = np.random.default_rng(seed)
    axes, swing = rng.normal(size=(len(JOINTS), 3)), rng.uniform(0.2, 0.7, len(JOINTS))
    if not leans:
        axes[0] = (0, 1, 0)
    time = np.arange(frames) / FPS
    rotations = np.stack(
        [
            axis_rotation(a, s * np.sin(3 * time + j))
            for j, (a, s) in enumerate(zip(axes, swing, strict=True))
        ],
        1,
    )
    root = np.stack([0.3 * time, STANDING + 0.05 * np.sin(time), 0.1 * time], 1)
    return Motion(root, rotations)


def written(path, motion, names, scale=1.0, prefix="", seconds=1 / FPS, arms=1.0):
    """Write a motion with other names, in another unit, at another rate, with longer arms."""
    write_bvh(path, motion)
    lines, joint, rows = [], "", False
    for line in path.read_text().splitlines():
        words = line.split()
        if words[0] in ("ROOT", "JOINT"):
            joint = words[1]
            line = line.replace(joint, prefix + names[joint])
        elif words[0] == "OFFSET":
            longer = scale * (arms if joint.endswith(("elbow", "wrist")) else 1)
            line = "OFFSET " + " ".join(f"{float(w) * longer:.6f}" for w in words[1:])
        elif words[:2] == ["Frame", "Time:"]:
            rows, line = True, f"Frame Time: {seconds:.7f}"
        elif rows:
            values = [float(w) * (scale if i < 3 else 1) for i, w in enumerate(words)]
            line = " ".join(f"{v:.6f}" for v in values)
        lines.append(line)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("kind", "prefix"), [("Mixamo", "mixamorig:"), ("CMU", ""), ("Blender", "")]
)
def test_joints_of_known_skeletons_are_where_they_were(kind, prefix, tmp_path):
    motion = moving(30)
    path = written(tmp_path / "a.bvh", motion, KNOWN[kind], 100.0, prefix)
    found = read_bvh(path)
    assert found.frames == 30
    assert np.abs(found.joints - motion.joints).max() < 1e-3
    other = read_bvh(written(tmp_path / "b.bvh", moving(30, 1), KNOWN[kind], 100.0, prefix))
    assert np.abs(other.joints - motion.joints).max() > 0.1  # control


def test_bones_of_other_lengths_point_the_same_way(tmp_path):
    motion = moving(20, leans=True)
    found = read_bvh(written(tmp_path / "a.bvh", motion, KNOWN["CMU"], 0.5, arms=1.7))
    assert np.allclose(found.rotations[:, 0, :, 1], [0, 1, 0])  # upright
    assert not np.allclose(motion.rotations[:, 0, :, 1], [0, 1, 0], atol=0.1)  # control
    for j in (j for j in range(1, len(JOINTS)) if PARENTS[j]):
        bones = [m.joints[:, j] - m.joints[:, PARENTS[j]] for m in (found, motion)]
        directions = [b / np.linalg.norm(b, axis=1, keepdims=True) for b in bones]
        assert np.abs(directions[0] - directions[1]).max() < 1e-3, JOINTS[j]


def test_other_rates_are_resampled(tmp_path):
    motion = moving(121)
    path = written(tmp_path / "a.bvh", motion, KNOWN["Mixamo"], seconds=1 / 120)
    found = read_bvh(path)
    assert found.frames == 21
    assert np.abs(found.joints - motion.joints[::6]).max() < 1e-3


def test_a_file_names_the_joints_of_any_skeleton(tmp_path):
    motion, names = moving(10), {j: f"bone {i}".replace(" ", "_") for i, j in enumerate(JOINTS)}
    path = written(tmp_path / "a.bvh", motion, names)
    with pytest.raises(GenError, match=r"or of Mixamo, CMU, Blender .*or a file that names them"):
        read_bvh(path)
    assert np.abs(read_bvh(path, names).joints - motion.joints).max() < 1e-3
    with pytest.raises(GenError, match="joint for head"):
        read_bvh(path, {**names, "head": "skull"})
    with pytest.raises(GenError, match="joint 'heads'"):
        read_bvh(path, {**names, "heads": "bone_1"})


def test_half_turns_are_turned():
    a = np.eye(3)
    made = _turn(a, -a)
    assert np.allclose(np.einsum("tij,tj->ti", made, a), -a)
    assert np.allclose(np.linalg.det(made), 1)


def test_motions_of_other_skeletons_are_encoded(tmp_path):
    media, names = tmp_path / "media", {j: f"b{i}" for i, j in enumerate(JOINTS)}
    media.mkdir()
    written(media / "a.bvh", moving(64), KNOWN["Mixamo"], 100.0, "mixamorig:")
    asked = ["encode", "motion", str(media), "--out"]
    assert main([*asked, str(tmp_path / "D")]) == 0
    assert len(load_data(tmp_path / "D").tokens) == 1
    (media / "a.bvh").unlink()
    written(media / "b.bvh", moving(64), names)
    assert main([*asked, str(tmp_path / "E")]) != 0
    (tmp_path / "names.json").write_text(json.dumps(names))
    named = ["--skeleton", str(tmp_path / "names.json")]
    assert main([*asked, str(tmp_path / "F"), *named]) == 0
    assert torch_equal(load_data(tmp_path / "F").tokens[0], load_data(tmp_path / "D").tokens[0])


def torch_equal(a, b):
    return a.shape == b.shape and (a == b).float().mean() > 0.9  # written with six digits
