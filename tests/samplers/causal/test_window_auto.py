"""``window: auto``: it finds the width that pays, and changes nothing about what is committed."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from decoding import decode_causal
from enumeration import distance, enumerate_distribution
from tabular import TabularCausal, causal_distribution, causal_target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.causal.drafters import model as drafting
from gen.samplers.causal.drafters.model import ModelDrafter
from gen.samplers.causal.jacobi import JacobiDrafter, SpeculativeJacobi
from gen.samplers.engine import window as auto_width
from gen.samplers.engine.window import LADDER, AutoWidth, Widths
from gen.samplers.verifiers.base import TOKEN

EXACT, WRONG = 1e-12, 1e-3
COUPLINGS = tuple(registry.table("coupling"))
CONTEXTS = 3


def space_of(length: int, ids: int) -> TokenSpace:
    return TokenSpace.codes((length,), ids, ids)


# --- what it decides


class Device:
    """Seconds that a round of so many rows and places takes, and tokens a row commits in it; rounds
    are played against a clock."""

    def __init__(self, seconds, tokens):
        self.seconds, self.tokens, self.step = seconds, tokens, 0.0

    def play(
        self, known: Widths, rows: int, rounds: int, most: int = 64
    ) -> tuple[list[int], float]:
        """Widths of all rounds, and tokens per second."""
        auto, seen, made, began = (
            AutoWidth(known, rows, most, lambda: self.step),
            [],
            0.0,
            self.step,
        )
        for _ in range(rounds):
            width = auto.width
            seen.append(width)
            self.step += self.seconds(rows, width)
            made += self.tokens(width)
            auto.observe(width, np.full(rows, made % 256), np.full(rows, self.tokens(width)))
        return seen, made / (self.step - began)


def FLAT(rows, width):
    return 2.0  # a device that is never full


def FULL(rows, width):
    return 0.2 + rows * width  # one that is full at once


def BENT(rows, width):
    return 1.0 + 0.03 * rows * width


@pytest.mark.parametrize(("seconds", "best"), [(FLAT, 64), (FULL, 1), (BENT, 16)])
def test_the_width_that_pays_is_found_and_kept(seconds, best):
    def tokens(width):
        return 1 + 0.9 * np.log2(width)

    device, known = Device(seconds, tokens), Widths()
    device.play(known, 1, 300)
    seen, _ = device.play(known, 1, 200)
    rate = {w: tokens(w) / seconds(1, w) for w in LADDER if w <= 64}
    assert max(rate, key=rate.get) == best and seen.count(best) > 0.75 * len(seen)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("seconds", [FLAT, FULL, BENT])
@pytest.mark.parametrize("gain", [0.0, 0.3, 0.9])
@pytest.mark.thinned(3)
def test_it_is_never_more_than_a_twentieth_slower_than_one_place_at_a_time(rows, seconds, gain):
    """Once the widths were tried; trying them costs what it costs, and is paid once per model."""
    device, known = Device(seconds, lambda width: 1 + gain * np.log2(width)), Widths()
    device.play(known, rows, 300)
    _, rate = device.play(known, rows, 400)
    assert rate >= 0.95 * 1 / seconds(rows, 1)


def test_control_one_that_keeps_the_widest_is_slower():
    device = Device(FULL, lambda width: 1 + 0.3 * np.log2(width))
    wide = device.tokens(64) / device.seconds(8, 64)
    assert wide < 0.95 * device.tokens(1) / device.seconds(8, 1)


def test_a_device_that_changes_is_noticed():
    device, known = Device(FLAT, lambda width: 1 + 0.9 * np.log2(width)), Widths()
    seen, _ = device.play(known, 1, 200)
    assert seen[-1] == 64
    device.seconds = lambda rows, width: 0.2 + width
    seen, _ = device.play(known, 1, 1500)
    assert seen[-100:].count(64) < 20


def test_costs_between_those_that_were_seen_are_between_them():
    known = Widths()
    for rows, width, seconds in ((1, 1, 1.0), (1, 8, 2.0), (4, 8, 5.0)):
        known.see(rows, width, 0.0, seconds, 1.0)

    def cost(rows, width):
        return known.cost(rows, width, 0.0)

    assert cost(1, 8) == 2.0 and cost(2, 4) == 2.0 and 2.0 < cost(2, 8) < 5.0 and cost(8, 8) == 10.0
    known.see(1, 8, 0.0, 100.0, 1.0)  # rounds that the machine was busy in
    known.see(1, 8, 0.0, 50.0, 1.0)
    assert cost(1, 8) == 2.0


def test_rounds_that_get_longer_as_rows_do_are_compared_at_one_place():
    """Else a width that was tried early would look cheap beside one that was tried late."""
    known = Widths()
    for far in range(10):
        known.see(8, 1, far, 1.0 + 0.01 * far, 1.0)
        known.see(8, 4, 200.0 + far, 1.5 + 0.01 * (200 + far), 1.5)
    assert abs(known.slope(8) - 0.01) < 1e-9 and known.slope(2) == 0
    assert abs(known.cost(8, 1, 200.0) - 3.0) < 0.05 and abs(known.cost(8, 4, 0.0) - 1.5) < 0.05
    assert known.worth(8, 4, 200.0) > known.worth(8, 1, 200.0) and known.worth(
        8, 4, 0.0
    ) < 1.1 * known.worth(8, 1, 0.0)


def test_a_wider_window_is_not_given_up_for_a_few_bad_rounds():
    known = Widths()
    for tokens, width in ((1.0, 1), (2.0, 4), (1.1, 8)):
        for _ in range(30):
            known.see(1, width, 0.0, 1.0, tokens)
    assert known.gain(1) == 1.0 and known.gain(4) == known.gain(8) == 2.0
    assert AutoWidth(known, 1, 64).width == 16, "worth as much as the best, so wider ones are tried"


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("rounds", [128, 400, 4000])
@pytest.mark.parametrize("seconds", [FLAT, FULL, BENT])
def test_where_nothing_is_accepted_the_window_closes_and_seldom_opens(seconds, rounds, rows):
    """Whatever the clock says: columns are counted."""
    seen, _ = Device(seconds, lambda width: 1.0).play(Widths(), rows, rounds)
    assert sum(seen) <= 1.1 * rounds and max(seen) > 1, "it is tried, and given up"
    opened = [at for at in range(1, rounds) if seen[at] > seen[at - 1]]
    gaps = np.diff(opened)
    assert all(gap >= 128 for gap in gaps) and all(b > 1.5 * a for a, b in pairwise(gaps))


def test_short_calls_go_on_where_the_last_one_ended():
    device, known = Device(FLAT, lambda width: 1.0), Widths()
    columns = [sum(device.play(known, 1, 40)[0]) for _ in range(10)]
    assert sum(columns) <= 1.1 * 400 and columns.count(40) >= 7


def test_control_a_trial_that_accepts_one_draft_in_two_steps_goes_on():
    seen, _ = Device(FLAT, lambda width: 1.0 if width == 1 else 1.5).play(Widths(), 1, 400)
    assert seen.count(1) < 100 and max(seen) > LADDER[1]


def test_a_model_that_accepts_later_is_tried_again():
    device, known = Device(FLAT, lambda width: 1.0), Widths()
    device.play(known, 1, 400)
    device.tokens = lambda width: 1 + 0.9 * np.log2(width)
    seen, _ = device.play(known, 1, 1200)
    assert seen[-1] > LADDER[1] and known.wait == 128


def test_no_more_places_than_there_are():
    seen, _ = Device(FLAT, lambda width: width).play(Widths(), 1, 100, most=10)
    assert max(seen) == 8
    assert set(Device(FLAT, lambda width: width).play(Widths(), 1, 20, most=1)[0]) == {1}


# --- on a busy machine


def CALM(rng):
    return 1.0


def SLOWER(rng):
    return rng.uniform(1, 2)  # others take the processor now and then


def EITHER(rng):
    return 2 ** rng.uniform(-1, 1)


def HALF(rng):
    return 1 + (rng.random() < 0.5)


class Busy(Device):
    """Device whose rounds take longer by chance, and accept as many drafts as in every run."""

    def __init__(self, seconds, noise, seed: int):
        rng, accepts = np.random.default_rng(seed), np.random.default_rng(7)

        def noisy(rows, width):
            return seconds(rows, width) * noise(rng)

        def tokens(width):  # a draft after the first is as good as accepted at 0.8
            return min(int(accepts.geometric(0.2)), width)

        super().__init__(noisy, tokens)


def all_widths(seconds, noise, rows: int, runs: int = 20) -> set[tuple[int, ...]]:
    """Return the sequences of widths, and with them the forward passes, of calls of one pipeline
    after the other that differ in the noise of the clock alone."""
    found = set()
    for seed in range(runs):
        device, known = Busy(seconds, noise, seed), Widths()
        calls = [device.play(known, rows, 250)[0] for _ in range(3)]
        found.add(tuple(width for call in calls for width in call))
    return found


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("noise", [SLOWER, EITHER, HALF])
@pytest.mark.parametrize("seconds", [FLAT, BENT, FULL])
@pytest.mark.thinned(4)
def test_under_a_noisy_clock_every_run_has_the_same_widths(seconds, noise, rows):
    [widths] = all_widths(seconds, noise, rows)
    assert len(set(widths)) > 2, "they are tried"


@pytest.mark.parametrize("noise", [SLOWER, EITHER])
def test_control_a_clock_that_is_always_believed_gives_others(noise, monkeypatch):
    monkeypatch.setattr(Widths, "is_clear", lambda known, *widths: True)
    assert len(all_widths(BENT, noise, 1)) > 10
    assert len(all_widths(BENT, CALM, 1, runs=3)) == 1


def test_counting_agrees_with_a_clear_clock_within_a_tenth():
    """The clock has a say only where it is sure; here both find the same width."""
    [calm], [busy] = (all_widths(BENT, noise, 1, runs=2) for noise in (CALM, SLOWER))
    assert set(calm[-100:]) & set(busy[-100:])


def test_control_a_clear_clock_overrules_counting():
    """On a device that is full at once counting alone keeps a window that the clock closes."""
    [calm], [busy] = (all_widths(FULL, noise, 1, runs=2) for noise in (CALM, SLOWER))
    assert calm[-100:].count(1) > 75 > busy[-100:].count(1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_under_a_noisy_clock_a_sampler_takes_the_same_forward_passes(seed):
    spec = {"name": "speculative_jacobi", "window": "auto"}
    sampler, sampling = resolve_sampler(spec)
    found = set()
    for run_seed in range(20):
        rng, ticks = np.random.default_rng(100 * seed + run_seed), [0.0]

        def clock(rng=rng, ticks=ticks):
            ticks.append(ticks[-1] + rng.uniform(1, 2))
            return ticks[-1]

        known = {(sampler, sampling): Widths(clock=clock)}
        stats = [s for n in range(3) for s in run(spec, n, known, length=100)[0].stats]
        found.add(tuple(s.nfe for s in stats))
    assert len(found) == 1 and 0 < sum(next(iter(found))) < 9 * 100


def test_the_clock_of_a_cpu_stands_still_while_the_thread_waits():
    clock = Widths.on(torch.device("cpu"), 1).clock
    began = clock()
    time.sleep(0.05)
    assert clock() - began < 0.02
    assert Widths.on(torch.device("cuda"), 2).clock is time.perf_counter


# --- that it may


class ByHistory:
    """A window that grows and shrinks with what was accepted: all that a clock could make it do,
    and more."""

    def __init__(self, most: int):
        self.most, self.width = most, 2

    def observe(self, width, starts, tokens):
        self.width = 1 + (int(tokens.sum()) + self.width) % self.most


def jacobi_error(
    coupling: str, init: str, window, drafter=JacobiDrafter, ids: int = 2, length: int = 4
) -> float:
    """The largest error of a probability. Row by row, since rows of a batch share their width and
    scripts must not hear of each other."""
    model, sampling, space = TabularCausal(ids), SamplingParams(), space_of(length, ids)

    def decode(rng, context):
        target = causal_target(model, space, sampling, context)
        part = registry.get("coupling", coupling)()
        first = registry.get("initialiser", init).make(SpeculativeJacobi(), target, None)
        return decode_causal(target, rng, drafter(target, window(3), part, first)).tokens

    found = enumerate_distribution(decode, CONTEXTS, rows=1)
    return max(
        distance(found[c], causal_distribution(model, space, sampling, c)) for c in range(CONTEXTS)
    )


@pytest.mark.parametrize("init", ["uniform", "repeat"])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(4)
def test_windows_that_follow_what_was_accepted_keep_the_distribution(coupling, init):
    assert jacobi_error(coupling, init, ByHistory) < EXACT


class ByValue(JacobiDrafter):
    """Leaves out drafts because of what they are."""

    def propose(self, step, tokens):
        draft = super().propose(step, tokens)
        draft.exists = draft.exists & (draft.tokens == 0).long().cumprod(1).bool()
        return draft


@pytest.mark.parametrize("coupling", ["fresh", "maximal", "gumbel_shared"])
def test_control_drafts_left_out_for_their_value_do_not(coupling):
    assert jacobi_error(coupling, "uniform", ByHistory, ByValue) > WRONG


def test_chains_whose_length_follows_what_was_accepted_keep_the_distribution():
    model, small, sampling, space = (
        TabularCausal(2),
        TabularCausal(2, seed=5),
        SamplingParams(),
        space_of(4, 2),
    )

    def decode(rng, context):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        lengths = drafting.AutoLength(ByHistory(3), 1)
        return decode_causal(target, rng, ModelDrafter(draft, TOKEN, lengths)).tokens

    found = enumerate_distribution(decode, CONTEXTS, rows=1)
    assert (
        max(
            distance(found[c], causal_distribution(model, space, sampling, c))
            for c in range(CONTEXTS)
        )
        < EXACT
    )


# --- in a sampler


def run(spec, seed: int = 0, known: dict | None = None, length: int = 40):
    sampler, sampling = resolve_sampler(spec)
    space = space_of(length, 8)
    target, draft = (
        causal_target(TabularCausal(8, seed=s), space, sampling, [0, 1, 2]) for s in (0, 3)
    )
    if known is not None:
        target.learned = known
    return (
        sampler(
            target,
            CounterRNG([seed, seed + 1, seed + 2]),
            draft=draft if sampler.drafted else None,
        ),
        target,
    )


def test_with_gumbel_the_tokens_are_those_of_any_window(monkeypatch):
    want = run("autoregressive")[0].tokens
    for most in (1, 3, 7):
        monkeypatch.setattr(
            auto_width, "AutoWidth", lambda known, rows, positions, most=most: ByHistory(most)
        )
        assert torch.equal(run({"name": "speculative_jacobi", "window": "auto"})[0].tokens, want)
    monkeypatch.undo()
    assert torch.equal(run({"name": "speculative_jacobi", "window": "auto"})[0].tokens, want)


def test_what_was_seen_is_kept_for_the_next_call_and_for_no_other_sampler():
    known: dict = {}
    run({"name": "speculative_jacobi", "window": "auto"}, known=known)
    assert len(known) == 1
    [widths] = known.values()
    rounds = sum(len(s) for s in widths.seconds.values())
    run({"name": "speculative_jacobi", "window": "auto"}, 5, known)
    assert len(known) == 1 and rounds > 3 and sum(widths.rounds(w) for w in widths.tokens) > 0
    run({"name": "speculative_jacobi", "window": "auto", "coupling": "maximal"}, 5, known)
    run({"name": "speculative", "num_speculative_tokens": "auto"}, 5, known)
    assert len(known) == 3


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ({"name": "speculative_jacobi", "window": "auto"}, True),
        ({"name": "speculative_jacobi", "window": "auto", "coupling": "maximal"}, False),
        ({"name": "speculative_jacobi", "window": 8, "coupling": "maximal"}, True),
        ({"name": "speculative", "num_speculative_tokens": "auto"}, False),
        ({"name": "speculative"}, True),
        ({"name": "relaxed_acceptance", "verifier": "typical", "window": "auto"}, False),
        ({"name": "continuous_jacobi", "window": "auto"}, False),
        ({"name": "continuous_jacobi", "window": "auto", "tolerance": 0}, True),
        ("autoregressive", True),
    ],
)
def test_a_sampler_says_whether_a_clock_has_a_say_in_its_tokens(spec, same):
    assert resolve_sampler(spec)[0].reproducible == same


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"name": "speculative_jacobi", "window": "atuo"},
            "sampler.window is 'atuo'; expected an integer of at least 1, or auto",
        ),
        (
            {"name": "speculative_jacobi", "window": 0},
            "sampler.window is 0; expected an integer of at least 1, or auto",
        ),
        (
            {"name": "relaxed_acceptance", "verifier": "gsd", "window": True},
            "sampler.window is True",
        ),
        (
            {"name": "speculative", "num_speculative_tokens": "much"},
            "sampler.num_speculative_tokens is 'much'; expected an integer of at least 1, or auto",
        ),
        (
            {"name": "speculative", "num_speculative_tokens": "auto", "policy": "heuristic"},
            "sampler.policy is 'heuristic'; expected constant",
        ),
    ],
)
def test_anything_else_is_refused(spec, words):
    with pytest.raises(GenError, match=words):
        resolve_sampler(spec)


def test_a_deterministic_job_refuses_what_a_clock_decides():
    from gen.config.job import make_job

    tree = {
        "modality": "text",
        "prompts": ["3 + 8 + 5 ="],
        "sampler": {"name": "speculative_jacobi", "window": "auto"},
        "deterministic": True,
    }
    with pytest.raises(
        GenError,
        match=(
            "sampler.window of jobs.0 in here is 'auto', which depends on timing; expected one that"
        ),
    ):
        make_job(tree, where="here")
    assert make_job({**tree, "deterministic": False}, where="here") and make_job(
        tree, ["sampler.window=8"], where="here"
    )
