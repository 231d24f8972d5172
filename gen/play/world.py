"""A world that is played: one frame per action, frames ahead, and back.

    world = gen.load_world(seed=3)
    frame = world.step("right")  # uint8 [16, 16, 3]
    world.ahead(4)  # while the player thinks: four frames as if "right" would last
    world.rollback(2)
    again = gen.World.from_state(world.state())

The frames are those of ``gen sample world`` with the same seed and actions.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.pipeline.pipeline import Pipeline
from gen.samplers.worlds.next_frame import JOINT, NONE, NextFrame
from gen.samplers.worlds.rollout import Pass, Rollout

MEMORY = 32  # frames that ``rollback`` takes off without computing keys again
MODALITY = "world"
STATE = ("model", "seed", "steps", "speculate", "ahead", "actions", "frames")  # keys of a state


class World:
    """World of one seed, and the frames and actions so far.

    Attributes:
        seed: seed of the start and of all random numbers.
        sampler: forward passes per frame and speculation.
        frames: frames so far, uint8 [16, 16, 3] each, the start first.
        actions: actions so far, one less.
        hits: frames that were ready when their action came.
        misses: frames that were ready and cut, since another action came.
        passes: forward passes so far.
        action_names: actions that the world takes.

    Args:
        pipe: pipeline of the modality, which may be shared.
        seed: the seed.
        steps: forward passes per frame.
        speculate: how frames ahead are made, as of ``next_frame``. With ``joint``, ``step`` makes
            ``ahead`` frames when none is ready; else it makes one, and ``ahead`` is called when
            there is time.
        ahead: most frames ahead.

    Raises:
        GenError: a parameter that the sampler or the model does not take.
    """

    def __init__(
        self,
        pipe: Pipeline,
        seed: int = 0,
        steps: int = 1,
        speculate: str = NONE,
        ahead: int = 4,
    ):
        self.sampler = NextFrame(steps=steps, speculate=speculate, ahead=ahead)
        self.pipe = pipe
        model, _, self._frontend = pipe.bound(pipe.model_name("next_frame"))
        self.action_names: tuple[str, ...] = tuple(model.config.actions)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Begin anew, with another seed unless it is None; return the start frame.

        Raises:
            GenError: no seed.
        """
        seed = self.seed if seed is None else seed
        item = self.pipe.plan([self.action_names[-1]], seed=seed)[0]
        target = self.pipe.target(self.sampler, SamplingParams(), [item])
        self.seed, self._space = seed, target.space
        self.hits = self.misses = self.passes = 0
        self._rollout = Rollout(
            target.model,
            target.starts,
            CounterRNG([self.pipe.draw_key(item)], target.device),
            self.sampler.steps,
            self.sampler.ahead + 1 + MEMORY,
            self._count,
        )
        self._ready: list[Tensor] = []  # frames ahead, latents [P, C]
        self.actions: list[str] = []
        self.frames = [self._pixels(self._rollout.frame(ROW)[0])]
        return self.frames[0]

    @property
    def ready(self) -> int:
        """Number of frames that are ready in case that the action lasts."""
        return len(self._ready)

    def step(self, action: str) -> np.ndarray:
        """Take an action; return the next frame, uint8 [16, 16, 3].

        Raises:
            GenError: an unknown action.
        """
        number = self._number(action)
        if self._ready and action == self.actions[-1]:
            self.hits += 1
        else:
            self._drop()
            n = self.sampler.ahead if self.sampler.speculate == JOINT else 1
            self._make(number, n)
        self.actions.append(action)
        self.frames.append(self._pixels(self._ready.pop(0)))
        return self.frames[-1]

    def ahead(self, n: int | None = None) -> int:
        """Make frames until ``n`` are ready, as if the last action would last.

        Args:
            n: frames to have ready, at most ``sampler.ahead``, which None stands for.

        Returns:
            How many are ready; 0 before the first action.

        Raises:
            GenError: a number that is not between 0 and ``sampler.ahead``.
        """
        most = self.sampler.ahead
        n = most if n is None else n
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= most:
            raise bad_value("n", n, f"an integer from 0 to {most}, the frames ahead of this world")
        if self.actions and n > self.ready:
            self._make(self._number(self.actions[-1]), n - self.ready)
        return self.ready

    def rollback(self, k: int = 1) -> np.ndarray:
        """Take the last ``k`` actions back; return the frame before them.

        Raises:
            GenError: a number that is not between 0 and the actions so far.
        """
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= len(self.actions):
            raise bad_value("k", k, f"an integer from 0 to {len(self.actions)}, the actions so far")
        self._ready = []
        length = len(self.frames) - k
        del self.frames[length:], self.actions[length - 1 :]
        if self._rollout.can_cut(0, length):
            self._rollout.cut(ROW, np.array([length]))
        else:
            self._restore()
        return self.frames[-1]

    def state(self) -> dict[str, Any]:
        """Return what ``from_state`` makes the same world from, as plain data that JSON holds.

        Frames that are ready are not part of it.
        """
        frames = np.stack(self.frames)
        packed = base64.b64encode(zlib.compress(frames.tobytes())).decode()
        sampler = self.sampler
        return {
            "model": self.pipe.model,
            "seed": self.seed,
            "steps": sampler.steps,
            "speculate": sampler.speculate,
            "ahead": sampler.ahead,
            "actions": list(self.actions),
            "frames": packed,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], pipe: Pipeline | None = None) -> Self:
        """Make the world of a state.

        Args:
            state: what ``state`` returned.
            pipe: pipeline to share; None loads the state's model.

        Raises:
            GenError: no state of a world.
        """
        if not isinstance(state, Mapping) or set(state) != set(STATE):
            raise GenError(
                f"the state of a world has the keys {', '.join(STATE)}; got {state!r:.80}"
            )
        world = cls(
            Pipeline(MODALITY, state["model"]) if pipe is None else pipe,
            state["seed"],
            state["steps"],
            state["speculate"],
            state["ahead"],
        )
        actions = list(state["actions"])
        for action in actions:
            world._number(action)
        shape = (len(actions) + 1, *world.frames[0].shape)
        try:
            flat = np.frombuffer(zlib.decompress(base64.b64decode(state["frames"])), np.uint8)
            frames = flat.reshape(shape)
        except (ValueError, TypeError, binascii.Error, zlib.error) as error:
            raise GenError(f"the frames of the state cannot be read: {error}") from None
        world.actions, world.frames = actions, [frame.copy() for frame in frames]
        world._restore()
        return world

    def _number(self, action: Any) -> int:
        names = self.action_names
        if not isinstance(action, str):
            raise bad_type("action", action, f"one of {', '.join(names)}")
        if action not in names:
            raise unknown("action", action, names)
        return names.index(action)

    def _make(self, number: int, n: int) -> None:
        """Make ``n`` frames ahead with one action."""
        joint = self.sampler.speculate == JOINT
        make = self._rollout.together if joint else self._rollout.one_by_one
        self._ready += list(make(ROW, np.full((1, n), number))[0])

    def _drop(self) -> None:
        """Cut the frames that are ready."""
        if self._ready:
            self.misses += len(self._ready)
            self._ready = []
            self._rollout.cut(ROW, np.array([len(self.frames)]))

    def _restore(self) -> None:
        """Let the roll-out be the frames and actions so far."""
        model = self._rollout.model
        clip = self._frontend.preprocess(np.stack(self.frames))[None]
        latents = self._frontend.encode(clip)[0].flatten(2).permute(1, 2, 0)
        numbers = [model.none_action, *map(self._number, self.actions)]
        self._rollout.restore(0, model.settle(latents), np.array(numbers))

    def _pixels(self, latents: Tensor) -> np.ndarray:
        """Decode latents [P, C] to pixels."""
        codes = self.pipe.modality.to_codes(latents[None], self._space)
        return self._frontend.postprocess(self._frontend.decode(codes)[0])[0]

    def _count(self, one: Pass) -> None:
        self.passes += 1


ROW = np.zeros(1, dtype=np.int64)  # the only row of a roll-out


def load_world(
    model: str | Path | None = None,
    *,
    seed: int = 0,
    steps: int = 1,
    speculate: str = NONE,
    ahead: int = 4,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
) -> World:
    """Return a world to play; see ``World``.

    Args:
        model: zoo name or folder of a frame model; None is the embedded one.
        seed: seed of the start and of all random numbers.
        steps: forward passes per frame.
        speculate: none, prefetch or joint.
        ahead: most frames ahead.
        device: device of the model.
        dtype: floating-point type of the model.

    Raises:
        GenError: an unknown name or a bad value.
    """
    return World(Pipeline(MODALITY, model, device, dtype), seed, steps, speculate, ahead)
