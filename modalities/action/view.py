"""Renderer of the tabletop: the camera image of an observation, and rollouts frame by frame with
their paths.

The camera looks straight down; y goes up. Drawing is in table coordinates at four times the
resolution, then averaged, for smooth edges. Equal states give equal pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from gen.modalities.action import world as tabletop
from gen.modalities.action.world import (
    BLOCK,
    BLOCK_RADIUS,
    GOAL,
    GRIPPER,
    GRIPPER_RADIUS,
    HALF,
    STATES,
    SUCCESS_RADIUS,
    WALL,
    WALL_X,
)

CAMERA, FRAME = 64, 192  # pixels: side of an observation image and of a rendered frame
IMAGE_KEY = "observation.images.top"
_FINE = 4  # drawn pixels per shown pixel, along each axis
# metres: half of the drawn thickness of the wall; the gripper's radius keeps it clear of it
_BAR = 0.012
_RIM, _RING = 0.01, 0.012  # metres

TABLE, EDGE, GRID = (247, 243, 235), (214, 204, 188), (236, 229, 217)
GOAL_FILL, GOAL_RING, REACHED = (214, 234, 212), (92, 158, 104), (148, 207, 146)
BLOCK_FILL, BLOCK_RING, BLOCK_PATH = (240, 158, 74), (190, 108, 34), (240, 196, 142)
HAND_FILL, HAND_RING, HAND_PATH = (46, 98, 160), (24, 58, 104), (138, 172, 212)
WALL_FILL, STRUCK = (88, 92, 104), (204, 62, 58)


def render(state: np.ndarray) -> np.ndarray:
    """Camera image of a state [7]: uint8 [64, 64, 3]."""
    return _draw(np.asarray(state, np.float64)[None], CAMERA, False)


def animate(state: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Frames of a chunk [T, 2] rolled out from a state [7], with the paths of gripper and block so
    far: uint8 [T + 1, 192, 192, 3]. A struck wall turns red, a reached goal is filled.
    """
    done = tabletop.rollout(actions, state)
    states, struck = (
        done.states.astype(np.float64),
        np.concatenate([[False], np.logical_or.accumulate(done.collided)]),
    )
    return np.stack([_draw(states[: i + 1], FRAME, bool(struck[i])) for i in range(len(states))])


def _draw(states: np.ndarray, side: int, struck: bool) -> np.ndarray:
    """Image of the last of the states [n, 7] over the paths through all of them: uint8 [side, side,
    3].
    """
    if states.ndim != 2 or states.shape[1] != STATES or not np.isfinite(states).all():
        raise ValueError(
            f"the state has the shape {list(states.shape[1:])}; expected {STATES} finite numbers"
        )
    now, scale = states[-1], side * _FINE
    image = Image.new("RGB", (scale, scale), TABLE)
    pen = _Pen(ImageDraw.Draw(image), scale)
    if side > CAMERA:
        for v in np.arange(1, 10) / 10:
            pen.line([(v, 0), (v, 1)], 0.003, GRID)
            pen.line([(0, v), (1, v)], 0.003, GRID)
    pen.draw.rectangle((0, 0, scale - 1, scale - 1), outline=EDGE, width=round(_RIM * scale))
    pushes, walled = (tabletop.kinds(now) == k for k in (1, 2))
    near = (
        np.linalg.norm((now[BLOCK] if pushes else now[GRIPPER]) - now[GOAL]) < SUCCESS_RADIUS
        and not struck
    )
    pen.disc(now[GOAL], SUCCESS_RADIUS, GOAL_RING)
    pen.disc(now[GOAL], SUCCESS_RADIUS - _RING, REACHED if near else GOAL_FILL)
    if pushes:
        pen.path(states[:, BLOCK], BLOCK_PATH)
    pen.path(states[:, GRIPPER], HAND_PATH)
    if walled:
        ends = [(WALL_X, now[WALL] - HALF), (WALL_X, now[WALL] + HALF)]
        pen.path(np.array(ends), STRUCK if struck else WALL_FILL, _BAR)
    if pushes:
        pen.disc(now[BLOCK], BLOCK_RADIUS, BLOCK_RING)
        pen.disc(now[BLOCK], BLOCK_RADIUS - 0.01, BLOCK_FILL)
        if near:
            pen.ring(now[GOAL], SUCCESS_RADIUS, GOAL_RING)  # the block would hide it
    pen.disc(now[GRIPPER], GRIPPER_RADIUS, HAND_RING)
    pen.disc(now[GRIPPER], GRIPPER_RADIUS - 0.008, HAND_FILL)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


class _Pen:
    """Pen that draws in metres, y up."""

    def __init__(self, draw: Any, scale: int):
        self.draw, self.scale = draw, scale

    def _at(self, point: Any) -> tuple[float, float]:
        return float(point[0]) * self.scale, (1 - float(point[1])) * self.scale

    def line(self, points: list[Any], width: float, colour: tuple[int, int, int]) -> None:
        self.draw.line([self._at(p) for p in points], colour, max(1, round(width * self.scale)))

    def disc(self, centre: Any, radius: float, colour: tuple[int, int, int]) -> None:
        (x, y), r = self._at(centre), radius * self.scale
        self.draw.ellipse((x - r, y - r, x + r, y + r), colour)

    def ring(self, centre: Any, radius: float, colour: tuple[int, int, int]) -> None:
        (x, y), r = self._at(centre), radius * self.scale
        self.draw.ellipse(
            (x - r, y - r, x + r, y + r), outline=colour, width=round(_RING * self.scale)
        )

    def path(self, points: np.ndarray, colour: tuple[int, int, int], half: float = 0.008) -> None:
        """Draw a line with round joints and ends."""
        if len(points) > 1:
            self.line(list(points), 2 * half, colour)
            for point in points:
                self.disc(point, half, colour)
