"""Synthetic dataset of bouncing balls: simulator, frames and sounds.

Clips are 16 frames of 16x16 RGB pixels at 8 frames per second. One ball or two fly to and fro
between two opposite walls of the frame, at one of two speeds, each on a lane of its own. The frame
in which a ball touches a wall has a hit, a tone of 100 ms that begins with the frame. The colour of
the ball decides its pitch, the speed its loudness. A frame has one hit at most.

Everything lies on whole pixels, and no two balls share a tile of 8x8. A codebook of all tiles is
therefore lossless (``gen.tokenizers.video.tiles``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from gen.modalities.audio.captions import COLOURS, Ball, Caption, natural
from gen.modalities.small_language import draw_conditions

SIZE, FRAMES, FPS = 16, 16, 8.0
BALL, TILE = 4, 8  # pixels
REACH = SIZE - BALL  # farthest position of a ball, in pixels from the first wall
RATE = 16_000  # samples per second
HOP = 2000  # samples of a frame
SAMPLES = FRAMES * HOP
SPEEDS = {"slow": 1, "fast": 2}  # pixels per frame
AXES = ("x", "y")
TWO = 0.4  # share of clips with two balls
# first and last lane of a single ball, of the first of two, of the second
LANES = ((1, REACH - 1), (1, TILE - BALL), (TILE, REACH - 1))

PALETTE = {"red": (230, 60, 50), "green": (60, 200, 90), "blue": (70, 110, 240)}
GROUND = (24, 24, 32)
MASK = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]], bool)

FREQUENCIES = {"high": 800.0, "mid": 512.0, "low": 320.0}  # Hz
LOUDNESS = {"slow": 0.2, "fast": 0.8}  # amplitude of a hit
TONE, DECAY, RELEASE = 1600, 600.0, 160  # samples: length, time constant, fade at the end


@dataclass(frozen=True)
class Path:
    """Ball and its path.

    Attributes:
        colour: one of ``COLOURS``.
        speed: one of ``SPEEDS``.
        lane: position across the path, in pixels.
        start: position along the path in the first frame, in pixels.
        forward: whether it moves away from the first wall at first.
    """

    colour: str
    speed: str
    lane: int
    start: int
    forward: bool

    def positions(self) -> np.ndarray:
        """Position along the path in every frame, int [FRAMES]."""
        at, step, out = self.start, SPEEDS[self.speed] * (1 if self.forward else -1), []
        for _ in range(FRAMES):
            out.append(at)
            at = min(max(at + step, 0), REACH)
            if at in (0, REACH):
                step = -step
        return np.array(out)

    def hits(self) -> tuple[int, ...]:
        """Frames in which the ball touches a wall."""
        return tuple(np.flatnonzero(np.isin(self.positions(), (0, REACH))).tolist())


@dataclass(frozen=True)
class Hit:
    """Hit of a ball: its frame, its colour, and whether it is loud."""

    frame: int
    colour: str
    loud: bool


@dataclass(frozen=True)
class Scene:
    """Clip: ``axis`` along which all ``paths`` lie."""

    axis: str
    paths: tuple[Path, ...]

    def hits(self) -> tuple[Hit, ...]:
        """All hits in order of time."""
        found = [Hit(f, p.colour, p.speed == "fast") for p in self.paths for f in p.hits()]
        return tuple(sorted(found, key=lambda hit: hit.frame))

    def caption(self) -> Caption:
        """Full caption, balls in the order of ``COLOURS``."""
        ordered = sorted(self.paths, key=lambda p: COLOURS.index(p.colour))
        return Caption(tuple(Ball(p.colour, len(p.hits()), natural(p.colour)) for p in ordered))

    def frames(self) -> np.ndarray:
        """Frames, uint8 [FRAMES, SIZE, SIZE, 3]."""
        out = np.empty((FRAMES, SIZE, SIZE, 3), np.uint8)
        out[:] = GROUND
        for path in self.paths:
            for frame, along in zip(out, path.positions(), strict=True):
                x, y = (along, path.lane) if self.axis == "x" else (path.lane, along)
                frame[y : y + BALL, x : x + BALL][MASK] = PALETTE[path.colour]
        return out

    def wave(self, pitches: dict[str, str] | None = None) -> np.ndarray:
        """Sound, float32 [SAMPLES]. ``pitches``: pitch by colour where it is not its own."""
        heard = pitches or {}
        return render(
            [(h.frame, heard.get(h.colour, natural(h.colour)), h.loud) for h in self.hits()]
        )


@cache
def tone(pitch: str, loud: bool) -> np.ndarray:
    """Sound of one hit, float32 [TONE]."""
    n = np.arange(TONE)
    fade = np.minimum(1, (TONE - n) / RELEASE)
    level = LOUDNESS["fast" if loud else "slow"] * np.exp(-n / DECAY) * fade
    return (level * np.sin(2 * np.pi * FREQUENCIES[pitch] / RATE * n)).astype(np.float32)


def render(hits: list[tuple[int, str, bool]]) -> np.ndarray:
    """Sound of hits (frame, pitch, loud), float32 [SAMPLES] in [-1, 1]."""
    out = np.zeros(SAMPLES, np.float32)
    for frame, pitch, loud in hits:
        out[frame * HOP : frame * HOP + TONE] += tone(pitch, loud)
    return out.clip(-1, 1)


def draw(rng: np.random.Generator, two: bool | None = None) -> Scene:
    """Draw a scene. ``two``: whether it has two balls; None draws that too."""
    while True:
        both = rng.random() < TWO if two is None else two
        axis = str(rng.choice(AXES))
        colours = rng.permutation(COLOURS)[: 1 + both]
        lanes = LANES[1:] if both else LANES[:1]
        scene = Scene(
            axis,
            tuple(
                Path(
                    str(colour),
                    str(rng.choice(list(SPEEDS))),
                    int(rng.integers(lane[0], lane[1] + 1)),
                    int(rng.integers(1, REACH)),
                    bool(rng.integers(2)),
                )
                for colour, lane in zip(colours, lanes, strict=True)
            ),
        )
        frames = [h.frame for h in scene.hits()]
        if len(set(frames)) == len(frames):
            return scene


def scenes(n: int, seed: int, held: bool) -> list[Scene]:
    """Draw ``n`` scenes, all of them held out, or none."""
    return draw_conditions(n, seed, draw, held)


def touches(frames: np.ndarray) -> list[tuple[int, str]]:
    """Find the frames in which a ball touches a wall, and its colour, in a clip uint8 [T, SIZE,
    SIZE, 3]."""
    shades = np.array([GROUND, *PALETTE.values()], float)
    nearest = np.linalg.norm(frames[..., None, :] - shades, axis=-1).argmin(-1)  # [T, SIZE, SIZE]
    rim = np.concatenate([nearest[:, [0, -1]], nearest[:, :, [0, -1]].swapaxes(1, 2)], 1)
    return [
        (t, colour)
        for t, seen in enumerate(rim)
        for i, colour in enumerate(PALETTE, 1)
        if (seen == i).any()
    ]


@cache
def tiles() -> np.ndarray:
    """All different tiles of all clips, uint8 [n, TILE, TILE, 3]; the first one is empty ground."""
    ground = np.empty((TILE, TILE, 3), np.uint8)
    ground[:] = GROUND
    found = {ground.tobytes(): ground}
    for colour in COLOURS:
        for y in range(1 - BALL, TILE):
            for x in range(1 - BALL, TILE):
                tile = ground.copy()
                top, left = max(y, 0), max(x, 0)
                part = MASK[top - y : TILE - y, left - x : TILE - x]
                tile[top : top + part.shape[0], left : left + part.shape[1]][part] = PALETTE[colour]
                found.setdefault(tile.tobytes(), tile)
    return np.stack(list(found.values()))
