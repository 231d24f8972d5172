"""Next frame: frame after frame, each denoised in a few steps given its action and the frames
before (Next-Frame Diffusion, arXiv 2506.01380).

    x_{f+1} = the end of K steps from the noise e_{f+1}, given a_{f+1} and x_{f-W+2} .. x_f

(``gen.samplers.worlds.rollout``). A world that is played does not know the next action. It can take
the present one for it, and have frames ready when the player goes on. ``speculate`` plays a row so:
a round makes ``ahead`` frames as if the action would last, shows those whose action came true, and
cuts the others.

none      one frame per round
prefetch  the frames of a round one after the other, each finished before the next
joint     the frames of a round at once: every step is one pass of all of them, so that a frame sees
          those before it half noised

If the action is repeated with probability r, a round of N frames keeps

    1 + r + ... + r^(N-1) = (1 - r^N) / (1 - r)     frames on average.

Guarantee: none and prefetch, the same frames as without speculation, since noise belongs to (item,
frame, position) and a frame that is cut leaves nothing behind; joint, approximate, and equal for
``ahead`` 1. The paper does not say which of the two it measures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from gen.core.errors import GenError
from gen.core.method import Limit, method
from gen.core.params import choice, integer
from gen.core.registry import register
from gen.core.rng import RNG
from gen.core.sampler import Callback, Sampler
from gen.core.stats import SampleOutput
from gen.samplers.engine.stats import StatsRecorder
from gen.samplers.worlds.rollout import Pass, Rollout

NONE, PREFETCH, JOINT = "none", "prefetch", "joint"


# proved by tests/samplers/worlds/test_next_frame.py, on frames
ONE_AHEAD = "one frame per round"


@method(
    "joint_frames",
    sampler="next_frame",
    about="frames ahead, denoised together while the action lasts",
    params={"speculate": JOINT},
    limit=Limit(ONE_AHEAD, {"ahead": 1}),
)
@method(
    "prefetched_frames",
    sampler="next_frame",
    about="frames ahead, one after the other while the action lasts",
    params={"speculate": PREFETCH},
    limit=Limit(ONE_AHEAD, {"ahead": 1}),
)
@register("sampler", "next_frame")
@dataclass(frozen=True)
class NextFrame(Sampler):
    """Decode frame after frame.

    ``steps``: forward passes per frame. ``speculate``: what a round makes under the assumption that
    the action lasts, none, prefetch or joint. ``ahead``: frames of a round.
    """

    steps: int = integer(1, least=1, each="step")
    speculate: str = choice(NONE, (NONE, PREFETCH, JOINT))
    ahead: int = integer(4, least=1, each="column")

    papers = ("2506.01380",)
    protocol = "frames"
    kinds = ("latents",)
    reference = "next_frame without speculation"

    @property
    def constraint_refusal(self) -> str:
        return "frames have no tokens"

    @property
    def guarantee(self) -> str:
        return "approximate" if self.speculate == JOINT and self.ahead > 1 else "same_tokens"

    @property
    def counts_steps(self) -> bool:
        """False: ``steps`` is per frame."""
        return False

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        if canvas is not None:
            raise GenError("a canvas came; expected none, since frames are made in order")
        return _Clips(self, target, rng, trace, callback).run()


class _Clips:
    """Clips of all items of a target while they are made."""

    def __init__(
        self, sampler: NextFrame, target, rng: RNG, trace: bool, callback: Callback | None
    ):
        self.sampler, self.callback = sampler, callback
        self.goal = target.frames.cpu().numpy()
        self.actions = target.actions.cpu().numpy()
        self.size: int = target.model.positions
        self.ahead = 1 if sampler.speculate == NONE else sampler.ahead
        self.passes: list[Pass] = []  # of the present round
        self.rollout = Rollout(
            target.model, target.starts, rng, sampler.steps, self.ahead, self.passes.append
        )
        self.tokens = torch.full_like(target.blank(), torch.nan, dtype=target.model.dtype)
        self.tokens[:, : self.size] = self.rollout.frame(np.arange(target.items))
        self.recorder = StatsRecorder(target.items, trace, self.ahead)
        self.step = 0

    def run(self) -> SampleOutput:
        """Make all frames of all rows."""
        began, rollout = time.perf_counter(), self.rollout
        while True:
            width = np.minimum(self.goal - rollout.length, self.ahead)
            if not width.any():
                break
            # rows that make as many frames, and have as many without keys, go together
            kinds = np.stack([width, rollout.length - rollout.keyed], 1)
            for kind in np.unique(kinds[width > 0], axis=0):
                self._round((kinds == kind).all(1).nonzero()[0], int(kind[0]))
        seconds = time.perf_counter() - began
        return self.recorder.output(self.tokens, seconds, (self.goal * self.size).tolist())

    def _round(self, rows: np.ndarray, n: int) -> None:
        """Make ``n`` frames of rows, and keep those whose action came true."""
        rollout, first = self.rollout, self.rollout.length[rows]
        real = self.actions[rows[:, None], first[:, None] - 1 + np.arange(n)]
        assumed = np.repeat(real[:, :1], n, 1)
        joint = self.sampler.speculate == JOINT
        frames = (rollout.together if joint else rollout.one_by_one)(rows, assumed)
        kept = (real == assumed).cumprod(1).sum(1)
        rollout.cut(rows, first + kept)
        for i, row in enumerate(rows.tolist()):
            at = int(first[i]) * self.size
            self.tokens[row, at : at + int(kept[i]) * self.size] = frames[i, : kept[i]].flatten(
                0, 1
            )
        self._record(rows, first, kept, n)

    def _record(self, rows: np.ndarray, first: np.ndarray, kept: np.ndarray, n: int) -> None:
        """Note the passes of a round; what it committed counts for the last one."""
        for number, one in enumerate(self.passes):
            last = number + 1 == len(self.passes)
            computed = one.frames * self.size
            counts = (kept * self.size, kept - 1, n - 1) if last else (0, 0, 0)
            self.recorder.add(rows, computed, computed, *counts)
            if self.recorder.traces is not None:
                for i, row in enumerate(rows.tolist()):
                    self._trace(row, one, i, int(first[i]), int(kept[i]) if last else 0)
            self.step += 1
            if self.callback is not None:
                known = ~self.tokens.isnan().any(-1)
                self.callback(
                    {
                        "step": self.step,
                        "done": int(known.sum()),
                        "total": int(self.goal.sum()) * self.size,
                        "tokens": self.tokens.nan_to_num(),
                        "known": known,
                    }
                )
        self.passes.clear()

    def _trace(self, row: int, one: Pass, i: int, first: int, kept: int) -> None:
        """Note one pass of a row: the start frame counts for the first one."""
        begin = int(one.first[i]) * self.size
        window = range(begin, begin + one.frames * self.size)
        made = range(first * self.size, (first + kept) * self.size)
        begins = self.recorder.traces is not None and not self.recorder.traces[row]
        positions = [*(range(self.size) if begins else ()), *made]
        committed = {n: self.tokens[row, n].tolist() for n in positions}
        self.recorder.add_trace(row, window, list(made)[self.size :], committed)
