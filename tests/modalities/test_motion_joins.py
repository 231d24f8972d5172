"""What is made anew between two ends of a motion meets them without a jump: on the models of the
zoo."""

from __future__ import annotations

import numpy as np
import pytest

import gen
from gen.modalities.motion import captions as moves
from gen.modalities.motion import synth as moves_draw


def largest_step(joints: np.ndarray) -> float:
    """Metres that a joint moves from one pose to the next, of joints [F, 22, 3], at most."""
    return float(np.linalg.norm(np.diff(joints, axis=0), axis=-1).max())


@pytest.fixture(scope="module")
def bound():
    rng = np.random.default_rng(0)
    return 1.5 * max(
        largest_step(moves_draw.draw(caption, rng).joints) for caption in moves.every_caption()
    )


@pytest.mark.parametrize(
    "said",
    [
        "a person jumps left twice",
        "a person runs forward quickly for eight steps",
        "a person kicks with the left leg three times",
    ],
)
def test_in_betweening_joins_without_a_jump(said, bound):
    clip = moves_draw.draw(moves.parse(said), np.random.default_rng(1))
    first, last = clip.frames // 16 * 4, clip.frames // 16 * 12
    made = gen.load("motion")(
        said, {"name": "maskgit", "steps": 10}, source=clip, span=f"{first}:{last}", seed=2
    ).media[0]
    joins = [made.joints[at - 4 : at + 3] for at in (first, last)]
    assert 0.01 < max(largest_step(j) for j in joins) < bound


def test_control_a_cut_jumps(bound):
    """Poses taken out of a run, and the ends put side by side."""
    clip = moves_draw.draw(
        moves.parse("a person runs forward quickly for eight steps"), np.random.default_rng(1)
    )
    assert (
        largest_step(np.delete(clip.joints, slice(clip.frames // 4, clip.frames // 4 * 3), 0))
        > bound
    )
