"""Worlds that are played: the same frames as a clip, ahead, back and from a state."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_frames import save_tiny_world

import gen
from gen.core.errors import GenError
from gen.modalities.world import board
from gen.play.world import MEMORY, World

STREAM = "up up up left left down stay stay right up up up".split()


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = save_tiny_world(tmp_path_factory.mktemp("tiny") / "world")
    return gen.load("world", folder, device="cpu", dtype="float64")


def clip(pipe, actions, seed=2, steps=2):
    return pipe(" ".join(actions), {"name": "next_frame", "steps": steps}, seed=seed).media[0]


@pytest.mark.parametrize("speculate", ["none", "prefetch"])
def test_a_played_world_has_the_frames_of_the_clip(pipe, speculate):
    world = World(pipe, 2, 2, speculate)
    for action in STREAM:
        world.step(action)
        if speculate == "prefetch":
            world.ahead(3)
    assert np.array_equal(np.stack(world.frames), clip(pipe, STREAM))
    assert world.frames[0].dtype == np.uint8 and world.frames[0].shape == (16, 16, 3)


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_ahead_and_rollback_leaves_the_frames_as_they_are(pipe, seed):
    rng, world = np.random.default_rng(seed), World(pipe, 2, 1, "prefetch", ahead=5)
    actions: list[str] = []
    for _ in range(40):
        kind = rng.random()
        if kind < 0.5:
            action = board.ACTIONS[rng.integers(5)] if kind < 0.3 or not actions else actions[-1]
            actions.append(action)
            world.step(action)
        elif kind < 0.8:
            world.ahead(int(rng.integers(6)))
        else:
            k = int(rng.integers(min(4, len(actions) + 1)))
            world.rollback(k)
            del actions[len(actions) - k :]
    assert world.actions == actions
    assert np.array_equal(np.stack(world.frames), clip(pipe, actions, steps=1))


def test_hits_and_misses_are_those_of_the_actions(pipe):
    world = World(pipe, 2, 1, "joint", ahead=3)
    for action in "up up up up left up".split():
        world.step(action)
    # rounds of three: up up up | up x x | left x x | up
    assert (world.hits, world.misses, world.passes) == (2, 4, 4)


def test_a_world_can_go_back_further_than_it_remembers(pipe):
    world, actions = World(pipe, 2, 1), STREAM * 4
    for action in actions:
        world.step(action)
    assert len(actions) > MEMORY + 12
    world.rollback(len(actions) - 2)
    for action in actions[2:]:
        world.step(action)
    assert np.array_equal(np.stack(world.frames), clip(pipe, actions, steps=1))


def test_a_state_is_plain_data_and_makes_the_same_world(pipe):
    world = World(pipe, 2, 2, "prefetch")
    for action in STREAM:
        world.step(action)
    state = json.loads(json.dumps(world.state()))
    again = World.from_state(state, pipe)
    assert again.actions == world.actions and np.array_equal(again.frames, world.frames)
    for action in ("left", "left", "down"):
        assert np.array_equal(world.step(action), again.step(action))
    loaded = gen.World.from_state(state)  # in float32: the same frames so far
    assert np.array_equal(loaded.frames[: len(STREAM)], world.frames[: len(STREAM)])


@pytest.mark.parametrize(
    "change", [{"frames": "!"}, {"frames": ""}, {"actions": ["up"]}, {"actions": ["fly"]}, {"x": 1}]
)
def test_a_state_that_cannot_be_is_refused(pipe, change):
    world = World(pipe, 2, 1)
    world.step("up")
    world.step("up")
    with pytest.raises(GenError):
        World.from_state({**world.state(), **change}, pipe)


def test_a_new_seed_is_a_new_world(pipe):
    world = World(pipe, 2, 1)
    first = world.step("up")
    assert not np.array_equal(world.reset(3), world.reset(4))
    world.reset(2)
    assert np.array_equal(world.step("up"), first) and world.actions == ["up"]


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda w: w.step("rigth"), "Did you mean 'right'?"),
        (lambda w: w.step(3), "expected one of up"),
        (lambda w: w.ahead(9), "an integer from 0 to 4"),
        (lambda w: w.ahead(True), "an integer from 0 to 4"),
        (lambda w: w.rollback(2), "an integer from 0 to 1"),
        (lambda w: w.rollback(-1), "an integer from 0 to 1"),
        (lambda w: w.reset(-1), "seed"),
    ],
)
def test_bad_calls_are_one_error_and_change_nothing(pipe, call, says):
    world = World(pipe, 2, 1)
    world.step("up")
    before = world.state()
    with pytest.raises(GenError, match=says.replace("?", r"\?")):
        call(world)
    assert world.state() == before


def test_nothing_is_made_ahead_before_the_first_action(pipe):
    assert World(pipe, 2, 1).ahead() == 0
