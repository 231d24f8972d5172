"""Camera of the tabletop: the state of a table from its image.

A policy that gets ``observation.images.top`` and no ``observation.state`` reads the state from the
pixels, and then does what it does with a given one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from gen.contracts.condition import ConditionEncoder
from gen.core.registry import register
from gen.media.given import GivenMedia
from gen.modalities.action.world import (
    BLOCK,
    BLOCK_RADIUS,
    GOAL,
    GRIPPER,
    HALF,
    STATE_NAMES,
    STATES,
    USED,
    WALL,
)
from gen.models.load.locate import ZOO, readable
from gen.models.nets.keypoints import Keypoints

FOLDER = "action-camera"  # zoo folder of the network
POINTS = 4  # gripper, goal, block, middle of the wall
MILLIMETRES = 3  # decimals of a state that was seen


@register("condition_encoder", "tabletop_camera")
class TabletopCamera(ConditionEncoder):
    """Network that reads the state of the table from a camera image uint8 [64, 64, 3].

    Args:
        folder: folder of ``config.json`` and ``model.safetensors``.
    """

    def __init__(self, folder: Path = ZOO / FOLDER):
        with readable("camera", folder):
            width = json.loads((folder / "config.json").read_text())["width"]
            self.net = Keypoints(POINTS, width)
            weights = load_file(folder / "model.safetensors")
            self.net.load_state_dict({k: v.float() for k, v in weights.items()})
        self.net.eval()

    @torch.no_grad()
    def encode(self, condition: GivenMedia) -> dict[str, Tensor]:
        """Return the ``points`` [4, 2] of an image: gripper, goal, block and wall, in metres."""
        pixels = torch.from_numpy(np.array(condition.array)).permute(2, 0, 1)[None] / 255
        return {"points": self.net(pixels)[0]}

    def state(self, image: GivenMedia, kind: str) -> np.ndarray:
        """Return the state float32 [7] of a table, to the millimetre.

        Args:
            image: image of the camera.
            kind: kind of task, which says what there is on the table.
        """
        gripper, goal, block, wall = self.encode(image)["points"].numpy()
        state = np.zeros(STATES, np.float32)
        state[GRIPPER], state[GOAL] = gripper.clip(0, 1), goal.clip(0, 1)
        state[BLOCK] = block.clip(BLOCK_RADIUS, 1 - BLOCK_RADIUS)
        state[WALL] = wall[1].clip(HALF, 1 - HALF)
        there = [name in USED[kind] for name in STATE_NAMES]
        return np.where(there, state.round(MILLIMETRES), 0).astype(np.float32)


@cache
def camera() -> TabletopCamera:
    """Load the embedded camera."""
    return TabletopCamera()
