"""Roll-outs of frame models: causality, cache, rollback, and a world in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_frames import LinearGaussian, Unrounded, rollout, starts, tiny_net

from gen.core.rng import CounterRNG
from gen.models.adapters.frames import FrameLM
from gen.samplers.worlds.rollout import CONTEXT, NOISE

ROW = np.zeros(1, dtype=np.int64)


def inputs(net, frames: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    config = net.config
    z = torch.randn(
        1, frames, config.positions, config.position_channels, generator=generator
    ).double()
    signal = torch.rand(1, frames, generator=generator).double()
    actions = torch.randint(5, (1, frames), generator=generator)
    return z, signal, torch.full((1, frames), 4), actions


# --- causality


@pytest.mark.parametrize("changed", ["frame", "action", "signal"])
def test_no_frame_sees_a_later_one(changed, monkeypatch):
    net, t = tiny_net(), 3
    z, signal, steps, actions = inputs(net, 6)
    other = {"frame": z.clone(), "action": actions.clone(), "signal": signal.clone()}
    other["frame"][:, t + 1 :] += 1
    other["action"][:, t + 1 :] = (actions[:, t + 1 :] + 1) % 5
    other["signal"][:, t + 1 :] *= 0.5
    given = {"frame": z, "action": actions, "signal": signal, changed: other[changed]}

    def both():
        with torch.no_grad():
            a = net(z, signal, steps, actions)[0]
            return a, net(given["frame"], given["signal"], steps, given["action"])[0]

    a, b = both()
    assert torch.equal(a[:, : t + 1], b[:, : t + 1])
    assert not torch.equal(a[:, t + 1 :], b[:, t + 1 :])
    # a mask that hides nothing is found out
    seen = type(net).temporal_scores
    monkeypatch.setattr(type(net), "temporal_scores", lambda *args: seen(*args).clamp_min(-1.0))
    a, b = both()
    assert not torch.equal(a[:, : t + 1], b[:, : t + 1])


@pytest.mark.parametrize("farther", [0, 1])
def test_a_layer_reaches_as_far_as_its_window(farther):
    """Through L layers, a frame depends on the L (W - 1) frames before it and on no other."""
    net = tiny_net(window=3)
    z, signal, steps, actions = inputs(net, 8)
    reach = net.config.num_hidden_layers * (net.config.window - 1)
    moved = z.clone()
    moved[:, 7 - reach - farther] += 1
    with torch.no_grad():
        a, b = (net(x, signal, steps, actions)[0][:, 7] for x in (z, moved))
    assert torch.equal(a, b) == bool(farther)


# --- cache


def uncached(model, actions, steps: int, frames: int, rng) -> torch.Tensor:
    """Frames of a row, each computed from all frames before it in one pass without a cache."""
    p, c, s = model.positions, model.channels, model.context_signal
    made = [starts(model)[0]]

    def noise(number, purpose):
        at = torch.arange(p)[None] + number * p
        return rng.normal(torch.zeros(1, dtype=torch.long), at, purpose, None, c)[0]

    for f in range(1, frames):
        before = torch.stack([(1 - s) * noise(n, CONTEXT) + s * x for n, x in enumerate(made)])
        z = noise(f, NOISE)
        known = torch.tensor([[model.none_action, *actions[:f]]])
        for k in range(steps):
            signal = torch.full((1, f + 1), s, dtype=torch.float64)
            counts = torch.full((1, f + 1), model.finest)
            signal[:, f], counts[:, f] = k / steps, steps
            with torch.no_grad():
                x, _ = model.model(torch.cat([before, z[None]])[None], signal, counts, known)
            z = z + (x[0, -1] - z) / (1 - k / steps) / steps
        made.append(z)
    return torch.stack(made)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_cache_changes_nothing(steps, monkeypatch):
    model = Unrounded(tiny_net())
    actions = np.random.default_rng(0).integers(5, size=15)
    expected = uncached(model, actions.tolist(), steps, 16, CounterRNG([10]))

    def error() -> float:
        run = rollout(model, steps=steps)
        made = run.one_by_one(ROW, actions[None])[0]
        return float((made - expected[1:]).abs().max())

    assert error() < 1e-9
    # keys of a wrong frame are found out
    run = type(rollout(model))._run

    def stale(self, rows, first, *rest):
        return run(self, rows, first - (first > 6), *rest)

    monkeypatch.setattr(type(rollout(model)), "_run", stale)
    assert error() > 1e-3


def test_the_cache_is_bounded():
    run = rollout(Unrounded(tiny_net()), ahead=2)
    size = run._ring[0][0].shape
    run.one_by_one(ROW, np.zeros((1, 50), int))
    assert run._ring[0][0].shape == size == (1, 5, 4, 16) and run.length[0] == 51


# --- rollback


class ByAttempt(CounterRNG):
    """Random numbers that belong to the call instead of the frame."""

    calls = 0

    def normal(self, rows, positions, purpose, round, size):
        self.calls += 1
        return super().normal(rows, positions, f"{purpose} {self.calls}", round, size)


def played(model, actions, ahead: int, rng, cuts: np.random.Generator) -> torch.Tensor:
    """Frames of a row that makes some frames ahead with other actions and cuts them, again and
    again."""
    run, made = rollout(model, ahead=ahead, rng=rng), []
    for action in actions:
        length = int(run.length[0])
        if ahead > 1:
            run.one_by_one(ROW, cuts.integers(5, size=(1, cuts.integers(1, ahead + 1))))
            run.cut(ROW, np.array([length]))
        made.append(run.one_by_one(ROW, np.array([[action]]))[0, 0])
    return torch.stack(made)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_was_rolled_back_is_as_if_it_had_not_been(seed):
    model, source = FrameLM(tiny_net()), np.random.default_rng(seed)
    actions = source.integers(5, size=12)
    plain = played(model, actions, 1, CounterRNG([10]), source)
    assert torch.equal(plain, played(model, actions, 5, CounterRNG([10]), source))
    # draws of the attempt instead of the frame are found out
    assert not torch.equal(plain, played(model, actions, 5, ByAttempt([10]), source))


def test_a_restored_row_goes_on_bit_for_bit():
    model, actions = FrameLM(tiny_net()), np.random.default_rng(3).integers(5, size=30)
    run = rollout(model, ahead=2)
    frames = torch.cat([run.frame(ROW), run.one_by_one(ROW, actions[None, :25])[0]])
    end = run.one_by_one(ROW, actions[None, 25:])
    numbers = np.concatenate([[model.none_action], actions[:25]])
    other = rollout(model, ahead=2)
    other.restore(0, frames, numbers)
    assert torch.equal(end, other.one_by_one(ROW, actions[None, 25:]))
    # other frames before the end are found out
    moved = frames.clone()
    moved[-3] = -moved[-3]
    other.restore(0, moved, numbers)
    assert not torch.equal(end, other.one_by_one(ROW, actions[None, 25:]))


def test_frames_that_the_ring_has_forgotten_cannot_be_cut_back_to():
    run = rollout(FrameLM(tiny_net(window=4)), ahead=3)
    run.one_by_one(ROW, np.zeros((1, 20), int))
    assert [run.can_cut(0, n) for n in (21, 20, 19, 18, 5)] == [True, True, True, False, False]


# --- rows


def test_rows_advance_on_their_own():
    model = FrameLM(tiny_net())
    source = np.random.default_rng(5)
    actions, lengths = source.integers(5, size=(3, 9)), (9, 4, 7)
    run, made = rollout(model, rows=3), [[], [], []]
    for t in range(9):
        rows = np.array([r for r in range(3) if t < lengths[r]])
        for r, frame in zip(rows, run.one_by_one(rows, actions[rows, t : t + 1]), strict=True):
            made[r].append(frame[0])
    for r in range(3):
        alone = rollout(model, rows=3)
        expected = alone.one_by_one(np.array([r]), actions[r : r + 1, : lengths[r]])[0]
        assert torch.equal(torch.stack(made[r]), expected)
    assert not torch.equal(made[0][0], made[1][0])


# --- joint frames


def test_one_joint_frame_is_a_plain_one_and_several_are_not():
    model, actions = FrameLM(tiny_net()), np.array([[2, 2, 2]])
    plain = rollout(model, ahead=3).one_by_one(ROW, actions)
    assert torch.equal(plain[:, :1], rollout(model, ahead=3).together(ROW, actions[:, :1]))
    assert not torch.equal(plain, rollout(model, ahead=3).together(ROW, actions))


# --- a linear-Gaussian world


def gain(steps: int, s: float) -> float:
    """Factor of the noise after ``steps`` Euler steps of the exact field, in closed form."""
    levels = [k / steps for k in range(steps)]
    return math.prod(
        1 + (t * s * s - (1 - t)) / steps / ((1 - t) ** 2 + t * t * s * s) for t in levels
    )


@pytest.mark.parametrize("steps", [1, 2, 4, 256])
def test_the_next_frame_of_a_linear_gaussian_world_has_the_closed_form(steps):
    """Steps keep the mean and scale the noise by ``gain``, which tends to the true deviation."""
    world, actions = LinearGaussian(positions=20_000), np.array([[0, 2]])
    run = rollout(world, steps=steps)
    before, first, second = run.frame(ROW)[0], *run.one_by_one(ROW, actions)[0]
    positions = torch.arange(20_000)[None]
    for number, old, new, action in ((1, before, first, 0), (2, first, second, 2)):
        noise = run.rng.normal(
            torch.zeros(1, dtype=torch.long), positions + number * 20_000, NOISE, None, 1
        )[0]
        mean = world.A * old + world.B[action]
        assert torch.allclose(new, mean + gain(steps, world.S) * noise, atol=1e-10)
        deviation = new - mean
        assert abs(float(deviation.mean())) < 4 * gain(steps, world.S) / math.sqrt(20_000) + 1e-12
        spread = float(deviation.var()) - gain(steps, world.S) ** 2
        assert abs(spread) < 4 * gain(steps, world.S) ** 2 * math.sqrt(2 / 20_000) + 1e-12
    assert (abs(gain(steps, world.S) - world.S) < 0.01) == (steps == 256)
