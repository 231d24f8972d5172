"""A policy checks every observation, also those that it predicts nothing from."""

from __future__ import annotations

import numpy as np
import pytest

import gen
from gen.core.errors import GenError
from gen.interop.lerobot import Policy

GOOD = {"observation.state": np.full(7, 0.5, np.float32), "task": "reach"}
SENSELESS = {
    "NaN": {**GOOD, "observation.state": np.full(7, np.nan, np.float32)},
    "another length": {**GOOD, "observation.state": np.zeros(3, np.float32)},
    "nothing": {},
    "no mapping": None,
    "another task": {**GOOD, "task": "dance"},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = Policy(gen.load("action", device="cpu"), n_action_steps=np.int64(6))
    made.select_action(observation(made))
    return made


def test_parameters_of_the_sampler_are_arguments(policy):
    with pytest.raises(GenError, match="unknown keyword 'stepz'. Did you mean 'steps'"):
        Policy(policy.pipeline, "maskgit", stepz=3)
    made = Policy(policy.pipeline, "maskgit", steps=3, temperature=0.5)
    assert made.sampler == {"name": "maskgit", "steps": 3} and made.sampling.temperature == 0.5


def observation(policy: Policy) -> dict:
    """Observation that the policy takes."""
    situation = policy.pipeline.plan(["push the block"], 1, 0)[0].condition
    return {"observation.state": situation.state, "task": str(situation.task)}


@pytest.mark.parametrize("case", SENSELESS)
def test_an_observation_without_sense_is_an_error_while_actions_are_left(policy, case):
    assert policy._queue
    with pytest.raises(GenError):
        policy.select_action(SENSELESS[case])
    left = len(policy._queue)
    if left > 1:
        policy.select_action(observation(policy))  # control: one with sense gives the next action
        assert len(policy._queue) == left - 1
