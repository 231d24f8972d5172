"""Roll-out of frame models: rows of frames that grow by actions, and can be cut.

A frame f + 1 is made from its noise e in K steps along the signal levels t_0 = 0 < ... < t_K = 1,

    z_{k+1} = z_k + (t_{k+1} - t_k) (x^ - z_k) / (1 - t_k),   x^ = net(z_k, t_k, K, action, frames)

given the last W - 1 frames, which enter at one fixed level s: (1 - s) e' + s x. Keys and values of
those are in a ring of frames. The newest finished frame is not in it yet: the first step of the
next frame computes its keys in the same forward pass. A step is thus one forward pass, and W frames
and those ahead are all that is kept, for any number of frames.

e and e' belong to (item, frame, position). A frame that is cut and made again has the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.core.rng import RNG
from gen.models.adapters.protocols import FramesModel

NOISE, CONTEXT = "frame", "context"  # purposes of random numbers


@dataclass
class Pass:
    """Forward pass of some rows.

    Attributes:
        rows: int64 [b].
        first: first frame of each row that went through the model, int64 [b].
        frames: number of frames of each row.
    """

    rows: np.ndarray
    first: np.ndarray
    frames: int


class Rollout:
    """Rows of frames of one model.

    Attributes:
        length: frames of each row, int64 [B].
        newest: most frames that each row has had, int64 [B].
        keyed: frames whose keys are in the ring, int64 [B].

    Args:
        model: the model.
        starts: first frame of each row, latents [B, P, C].
        rng: random numbers of the rows.
        steps: K, forward passes per frame.
        ahead: most frames that are made at a time; a row can be cut by one less.
        passes: called after every forward pass.
    """

    def __init__(
        self,
        model: FramesModel,
        starts: Tensor,
        rng: RNG,
        steps: int,
        ahead: int = 1,
        passes: Callable[[Pass], None] | None = None,
    ):
        self.model, self.rng, self.steps, self.passes = model, rng, steps, passes
        self.levels = model.levels(steps)
        self.slots = model.window - 1 + ahead
        self.length = np.ones(len(starts), dtype=np.int64)
        self.newest = self.length.copy()
        self.keyed = np.zeros(len(starts), dtype=np.int64)
        self._ring = model.empty(len(starts), self.slots)
        frame = model.settle(starts.to(model.dtype))[:, None]
        self._frames = frame.repeat(1, self.slots, 1, 1)  # ring of the latents
        self._actions = np.full((len(starts), self.slots), model.none_action)

    def frame(self, rows: np.ndarray) -> Tensor:
        """Return the newest frame of rows, int64 [b]: latents [b, P, C]."""
        return self._frames[_long(rows), _long((self.length[rows] - 1) % self.slots)]

    def together(self, rows: np.ndarray, actions: np.ndarray) -> Tensor:
        """Make the next frames of rows, all at once: every step is one pass of all of them.

        Args:
            rows: int64 [b], all with as many frames whose keys are missing.
            actions: int64 [b, n], one per frame.

        Returns:
            Frames, latents [b, n, P, C].
        """
        n = actions.shape[1]
        waiting = int((self.length - self.keyed)[rows[0]])
        first = self.keyed[rows]
        numbers = first[:, None] + np.arange(waiting + n)  # [b, waiting + n]
        old = numbers[:, :waiting]
        entered = np.concatenate([self._actions[rows[:, None], old % self.slots], actions], 1)
        z = self._noise(rows, numbers[:, waiting:], NOISE)
        for k, (here, there) in enumerate(zip(self.levels, self.levels[1:], strict=False)):
            if k == 0:
                context = self._context(rows, old)
                x = self._run(rows, first, torch.cat([context, z], 1), entered, waiting, here)
                x = x[:, waiting:]
            else:
                x = self._run(rows, first + waiting, z, actions, 0, here)
            z = z + (there - here) * (x - z) / (1 - here)
        made = self.model.settle(z)
        at = _long(numbers[:, waiting:] % self.slots)
        self._frames[_long(rows)[:, None], at] = made
        self._actions[rows[:, None], numbers[:, waiting:] % self.slots] = actions
        self.length[rows] += n
        self.newest[rows] = np.maximum(self.newest[rows], self.length[rows])
        return made

    def one_by_one(self, rows: np.ndarray, actions: np.ndarray) -> Tensor:
        """Make the next frames of rows one after the other; see ``together``."""
        made = [self.together(rows, actions[:, i : i + 1]) for i in range(actions.shape[1])]
        return torch.cat(made, 1)

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Cut rows int64 [b] to so many frames, int64 [b], at least 1.

        Frames that the ring has forgotten cannot be cut back to; see ``can_cut``.
        """
        self.length[rows] = lengths
        # keys of the newest frame are made again, by the same pass as in a row that was not cut
        self.keyed[rows] = np.minimum(self.keyed[rows], lengths - 1)

    def restore(self, row: int, frames: Tensor, actions: np.ndarray) -> None:
        """Let a row be these frames, as if it had made them one by one.

        Keys of the last frames are computed again, one forward pass each: as many as reach the next
        frame through the layers.

        Args:
            row: the row.
            frames: settled latents [F, P, C].
            actions: action that led to each, int64 [F].
        """
        rows, count = np.array([row]), len(frames)
        begin = max(0, count - 1 - len(self._ring) * (self.model.window - 1))
        blank = torch.zeros_like(self._frames[:1, :1])
        for f in range(begin, count):
            self._frames[row, f % self.slots] = frames[f].to(blank)
            self._actions[row, f % self.slots] = actions[f]
            if f + 1 < count:
                number, entered = np.array([[f]]), actions[None, f : f + 2]
                z = torch.cat([self._context(rows, number), blank], 1)
                self._run(rows, number[0], z, entered, 1, self.levels[0])
        self.keyed[row], self.length[row], self.newest[row] = count - 1, count, count

    def can_cut(self, row: int, length: int) -> bool:
        """Return whether the ring has all that a row needs to go on from ``length`` frames."""
        return int(self.newest[row]) - max(length - self.model.window, 0) <= self.slots

    def _run(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        z: Tensor,
        actions: np.ndarray,
        entering: int,
        level: float,
    ) -> Tensor:
        """Run the model on frames [b, n, P, C] from ``first`` on, the first ``entering`` of them
        finished ones whose keys are kept. Returns predictions [b, n, P, C]."""
        b, n = actions.shape
        signal = z.new_full((b, n), level)
        signal[:, :entering] = self.model.context_signal
        steps = torch.full((b, n), self.steps, device=z.device)
        steps[:, :entering] = self.model.finest
        if self.passes is not None:
            self.passes(Pass(rows, first, n))
        before = first[:, None] + np.arange(1 - self.model.window, 0)  # [b, W - 1]
        known = torch.from_numpy(before >= 0).to(z.device)
        at, index = _long(before % self.slots), _long(rows)[:, None]
        past = [(keys[index, at], values[index, at]) for keys, values in self._ring]
        x, kept = self.model.forward(
            z, signal, steps, _long(actions).to(z.device), past, known, keep=entering > 0
        )
        if entering:
            at = _long((first[:, None] + np.arange(entering)) % self.slots)
            for (keys, values), (k, v) in zip(self._ring, kept, strict=True):
                keys[index, at], values[index, at] = k[:, :entering], v[:, :entering]
            self.keyed[rows] = first + entering
        return x

    def _context(self, rows: np.ndarray, numbers: np.ndarray) -> Tensor:
        """Return finished frames with these numbers, int64 [b, m], as later ones see them."""
        x = self._frames[_long(rows)[:, None], _long(numbers % self.slots)]
        s = self.model.context_signal
        return (1 - s) * self._noise(rows, numbers, CONTEXT) + s * x

    def _noise(self, rows: np.ndarray, numbers: np.ndarray, purpose: str) -> Tensor:
        """Draw the noise of frames with these numbers, int64 [b, m]: [b, m, P, C]."""
        p, device = self.model.positions, self.model.device
        positions = torch.from_numpy(numbers).to(device)[..., None] * p + torch.arange(
            p, device=device
        )
        drawn = self.rng.normal(
            _long(rows).to(device), positions.flatten(1), purpose, None, self.model.channels
        )
        return drawn.unflatten(1, (numbers.shape[1], p)).to(self.model.dtype)


def _long(x: np.ndarray) -> Tensor:
    """Copy an array of integers into a tensor."""
    return torch.from_numpy(np.ascontiguousarray(x))
