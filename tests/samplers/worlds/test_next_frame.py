"""The sampler of worlds: speculation, its counts, and rows of several lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_frames import save_tiny_world

import gen
from gen.core.errors import GenError
from gen.modalities.world import board
from gen.samplers.worlds.next_frame import NextFrame
from gen.samplers.worlds.rollout import Rollout

ACTIONS = board.ACTIONS


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """A world of random weights, in float64: rows of a batch are rounded alike."""
    folder = save_tiny_world(tmp_path_factory.mktemp("tiny") / "world")
    return gen.load("world", folder, device="cpu", dtype="float64")


def streams(count: int, seed: int, length=(3, 12)) -> list[str]:
    rng = np.random.default_rng(seed)
    rows = (
        board.persistent_actions(1, int(rng.integers(*length)), 0.6, rng)[0] for _ in "x" * count
    )
    return [" ".join(ACTIONS[a] for a in row) for row in rows]


def made(pipe, prompts, batch_size=8, **parameters):
    return pipe(
        prompts, {"name": "next_frame", "steps": 2, **parameters}, seed=4, batch_size=batch_size
    )


def same(a, b) -> list[bool]:
    return [
        x.shape == y.shape and bool((x == y).all()) for x, y in zip(a.media, b.media, strict=True)
    ]


@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_prefetched_frames_are_the_frames_without_speculation(pipe, ahead, monkeypatch):
    prompts = streams(5, ahead)
    plain = made(pipe, prompts)
    assert all(same(plain, made(pipe, prompts, speculate="prefetch", ahead=ahead)))
    # random numbers of the attempt instead of the frame are found out
    noise, calls = Rollout._noise, itertools.count(1)

    def by_attempt(self, rows, numbers, purpose):
        return noise(self, rows, numbers + 1000 * next(calls), purpose)

    monkeypatch.setattr(Rollout, "_noise", by_attempt)
    assert not all(same(plain, made(pipe, prompts, speculate="prefetch", ahead=ahead)))


def test_joint_frames_of_one_ahead_are_the_frames_without_speculation(pipe):
    prompts = streams(4, 9)
    plain = made(pipe, prompts)
    assert all(same(plain, made(pipe, prompts, speculate="joint", ahead=1)))
    assert not all(same(plain, made(pipe, prompts, speculate="joint", ahead=3)))


def test_a_clip_is_the_same_in_any_batch_and_after_any_prompt(pipe):
    prompts = streams(6, 2)
    together = made(pipe, prompts)
    assert all(same(together, made(pipe, prompts, batch_size=1)))
    alone = pipe(prompts[3], {"name": "next_frame", "steps": 2}, seed=4)
    assert bool((alone.media[0] == together.media[3]).all())
    other = pipe(prompts[3], {"name": "next_frame", "steps": 2}, seed=5)
    assert not bool((other.media[0] == together.media[3]).all())


def test_later_actions_change_no_earlier_frame(pipe):
    short, long = made(pipe, ["up up left"]), made(pipe, ["up up left down right"])
    assert bool((short.media[0] == long.media[0][:4]).all())
    changed = made(pipe, ["up up right"])
    assert bool((short.media[0][:3] == changed.media[0][:3]).all())
    assert not bool((short.media[0][3] == changed.media[0][3]).all())


@pytest.mark.parametrize("speculate", ["prefetch", "joint"])
@pytest.mark.parametrize("r", [0.5, 0.9, 0.98])
@pytest.mark.thinned(3)
def test_a_round_keeps_the_closed_form_of_a_markov_source(pipe, r, speculate):
    """The expectation over all patterns of repeats, each with its probability."""
    ahead = 4

    def source(persistence: float):
        rows, weights = [], []
        for repeats in itertools.product((True, False), repeat=ahead - 1):
            row = [0]
            for again in repeats:
                row.append(row[-1] if again else (row[-1] + 1) % len(ACTIONS))
            rows.append(" ".join(ACTIONS[a] for a in row))
            weights.append(np.prod([persistence if x else 1 - persistence for x in repeats]))
        return rows, np.array(weights)

    prompts, weights = source(r)
    spec = {"name": "next_frame", "steps": 1, "speculate": speculate, "ahead": ahead}
    out = pipe(prompts, spec, seed=0, trace=True, batch_size=8)
    size = 64
    first = []  # frames of the first round: the first pass that commits any after the start
    for trace in out.traces:
        counts = [sum(n >= size for n in step.committed) // size for step in trace]
        first.append(next(n for n in counts if n))
    expected = (1 - r**ahead) / (1 - r)
    assert float(weights @ np.array(first)) == pytest.approx(expected, abs=1e-12)
    other = source(r / 2)[1]
    assert abs(float(other @ np.array(first)) - expected) > 0.1


def test_statistics_and_traces_count_what_was_computed(pipe):
    prompts = ["up up up left", "up left"]
    out = pipe(
        prompts,
        {"name": "next_frame", "steps": 2, "speculate": "prefetch", "ahead": 3},
        seed=1,
        trace=True,
    )
    # rounds of 3 (all kept) and 1; of 2 (one kept) and 1
    assert [s.nfe for s in out.stats] == [8, 6]
    assert [s.tokens for s in out.stats] == [5 * 64, 3 * 64]
    assert [s.draft_acceptance_rate for s in out.stats] == [1.0, 0.0]
    for row, trace, stats in zip(out.tokens, out.traces, out.stats, strict=True):
        known = torch.full_like(row, torch.nan)
        for step in trace:
            for position, values in step.committed.items():
                known[position] = torch.tensor(values, dtype=row.dtype)
        assert torch.equal(known.nan_to_num(9), row.nan_to_num(9))
        assert sum(len(step.window) for step in trace) == stats.tokens_computed


@pytest.mark.parametrize(
    "parameters, says",
    [
        ({"steps": 0}, "sampler.steps"),
        ({"steps": 3}, "a power of two up to 8"),
        ({"steps": 16}, "a power of two up to 8"),
        ({"speculate": "yes"}, "none or prefetch or joint"),
        ({"ahead": 0}, "sampler.ahead"),
    ],
)
def test_bad_parameters_are_one_error(pipe, parameters, says):
    with pytest.raises(GenError, match=says):
        pipe("up", {"name": "next_frame", **parameters}, seed=0)


@pytest.mark.parametrize("option", [{"temperature": 0.5}, {"guidance_scale": 2.0}, {"top_k": 3}])
def test_sampling_parameters_of_tokens_are_refused(pipe, option):
    with pytest.raises(GenError, match=f"sampling.{next(iter(option))}"):
        pipe("up", seed=0, **option)


def test_guarantees_follow_the_parameters():
    said = {
        (s, n): NextFrame(speculate=s, ahead=n).guarantee
        for s in ("none", "prefetch", "joint")
        for n in (1, 4)
    }
    assert [k for k, v in said.items() if v == "approximate"] == [("joint", 4)]
