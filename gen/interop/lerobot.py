"""Policies: a pipeline of actions behind the three methods of LeRobot's policies.

policy = Policy(gen.load("action"))
policy.reset()
action = policy.select_action({"observation.state": state, "task": "reach"})  # float32 [D]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from gen.contracts.condition import Condition
from gen.core.errors import GenError, bad_type, bad_value
from gen.core.resolve import SamplerSpec
from gen.core.sampling_params import SamplingOptions
from gen.pipeline.arguments import read_integer, read_parameters
from gen.pipeline.output import ItemPlan
from gen.pipeline.pipeline import Pipeline

ARGUMENTS = ("pipeline", "sampler", "n_action_steps", "seed")


class Policy:
    """Policy that predicts chunks of actions and hands them out one by one.

    Chunk k after a reset has the seed ``seed + k``, so an episode is reproducible. An action that
    cannot be predicted raises an error.

    Args:
        pipeline: pipeline of actions.
        sampler: name of a sampler or preset, ``{"name": ..., parameter: value}`` or a sampler;
            None takes the one that suits the model.
        n_action_steps: actions of a chunk that are used before the next chunk is predicted; None
            uses all.
        seed: seed of the first chunk.
        sampling: sampling parameters, of which absent ones are the modality's default, and those of
            the sampler.

    Raises:
        GenError: a pipeline of another modality, a bad value, or an observation without sense.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sampler: SamplerSpec | None = None,
        n_action_steps: int | None = None,
        seed: int = 0,
        **sampling: Unpack[SamplingOptions],
    ):
        if "observation" not in pipeline.modality.accepts:
            raise GenError(
                "a policy needs a modality that takes observations, such as 'action';"
                f" got {pipeline.modality.name!r}"
            )
        if n_action_steps is not None:
            n_action_steps = read_integer("n_action_steps", n_action_steps, 1)
        seed = read_integer("seed", seed, 0)
        options = dict(sampling)
        sampler = read_parameters(sampler, pipeline.defaults.sampler, options, ARGUMENTS)
        self.pipeline, self.sampler = pipeline, pipeline.defaults.complete_sampler(sampler)
        self.n_action_steps, self.seed = n_action_steps, seed
        self.sampling = pipeline.resolve(self.sampler, explicit=options)[1]
        pipeline.model_name(self.sampler)  # a wrong model fails here, not on the robot
        self.reset()

    def reset(self) -> None:
        """Discard the rest of the last chunk. Call it when an episode begins."""
        self._queue: deque[np.ndarray] = deque()
        self._chunks = 0

    def _validated(self, observation: Mapping[str, Any]) -> Any:
        """Return the typed condition of an observation. Raises ``GenError``."""
        if not isinstance(observation, Mapping):
            raise bad_type("the observation", observation, "a mapping of names to values")
        return self.pipeline.modality.parse(Condition.of({"observation": observation}))

    def predict_action_chunk(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the actions from an observation on, in physical units: float32 [H, D]."""
        condition = self._validated(observation)
        given = Condition.of({"observation": observation})
        item = ItemPlan(0, str(condition), self.seed + self._chunks, condition, given=given)
        actions = np.asarray(self.pipeline.generate([item], self.sampler, self.sampling).media[0])
        if not np.isfinite(actions).all():
            raise GenError("the predicted actions hold NaN or inf; expected finite numbers")
        self._chunks += 1
        return actions

    def select_action(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the next action: float32 [D].

        Every observation is checked; a new chunk is predicted from it when the last one is used up.

        Raises:
            GenError: the observation makes no sense.
        """
        if self._queue:
            self._validated(observation)
        else:
            actions = self.predict_action_chunk(observation)
            if self.n_action_steps is not None and self.n_action_steps > len(actions):
                raise bad_value(
                    "n_action_steps",
                    self.n_action_steps,
                    f"at most {len(actions)}, the actions of a chunk",
                )
            self._queue.extend(actions[: self.n_action_steps])
        return self._queue.popleft()
