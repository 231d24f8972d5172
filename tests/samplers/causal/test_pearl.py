"""PEARL's schedule, and the distribution that it keeps.

The controls break one rule each and must miss by more than 1e-3.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, autoregressive, error, run, speculative
from tabular import TabularCausal, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.causal.drafters.pearl import PearlDrafter

VERIFIERS = [n for n, v in registry.table("verifier").items() if not v.relaxed]
FAST = {("token", 2), ("block", 3), ("recursive", 2)}
CASES = [
    pytest.param(v, g, marks=[] if (v, g) in FAST else [pytest.mark.slow], id=f"{v}-{g}")
    for v in VERIFIERS
    if not registry.get("verifier", v).needs_greedy
    for g in (1, 2, 3)
]


def pearl(length: int, verifier: str = "token"):
    return speculative(drafter="pearl", num_speculative_tokens=length, verifier=verifier)


@pytest.mark.parametrize(("verifier", "length"), CASES)
def test_the_distribution_is_kept(verifier, length):
    assert error(pearl(length, verifier), space_of((4,), 3), COMBINED) < EXACT
    assert error(pearl(length, verifier), with_end(3, 3)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_the_distribution_is_kept_over_many_rounds(verifier):
    assert error(pearl(2, verifier), space_of((6,), 2)) < EXACT
    assert error(pearl(2, verifier), with_end(4, 3)) < EXACT


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_control_the_distribution_of_the_draft_before(monkeypatch, verifier):
    """Drafts that are left are judged by their neighbours' distributions."""

    def observe(self, step, accepted, drafted, _true=PearlDrafter.observe):
        _true(self, step, accepted, drafted)
        self.left_logq = self.left_logq.roll(1, 1)

    monkeypatch.setattr(PearlDrafter, "observe", observe)
    assert error(pearl(3, verifier), space_of((3,), 3)) > WRONG


def test_control_an_unlikely_draft_is_not_left_for_the_next_round(monkeypatch):
    """Its own value decides whether it is submitted."""

    def observe(self, step, accepted, drafted, _true=PearlDrafter.observe):
        _true(self, step, accepted, drafted)
        mass = self.left_logq.gather(2, self.left_tokens[..., None])[:, 0, 0].exp()
        doubtful = (mass < 0.4).numpy() & (self.left > 0)
        self.known = np.where(doubtful, self.known - self.left, self.known)
        self.left = np.where(doubtful, 0, self.left)

    monkeypatch.setattr(PearlDrafter, "observe", observe)
    assert error(pearl(2), space_of((3,), 3)) > WRONG


def of_equal_models(length: int, positions: int):
    space, sampling = space_of((positions,), 5), SamplingParams(temperature=0.8)
    model = TabularCausal.with_params(sampling, 5)
    target, draft = (causal_target(model, space, sampling, [0, 1, 2]) for _ in range(2))
    return pearl(length)(target, CounterRNG([3, 14, 15]), draft=draft, trace=True)


def test_a_round_commits_as_many_tokens_as_it_drafts_where_all_are_accepted():
    """One token in the first round, whose target saw no draft; then g in each."""
    out = of_equal_models(3, 13)
    for trace, stats in zip(out.traces, out.stats, strict=True):
        assert [len(step.committed) for step in trace] == [1, 3, 3, 3, 3]
        assert [len(step.window) for step in trace] == [1, 3, 3, 3, 3]
        # the last round has nothing left to draft
        assert (stats.nfe, stats.draft_nfe) == (5, 3 + 3 + 3 + 3 + 1)


def test_a_rejection_drops_all_drafts_and_the_next_target_pass_has_none():
    out = run(pearl(3), space_of((12,), 5), SamplingParams(), trace=True)
    kinds = set()
    for trace in out.traces:
        for before, step in pairwise(trace):
            full = len(before.accepted) == len(before.window) - 1
            kinds.add((full, len(step.window)))
            assert full or len(step.window) == 1
    assert {(True, 3), (True, 1), (False, 1)} <= kinds


def test_all_draft_passes_stand_beside_a_target_pass():
    """The counts give the time on two devices: of a target pass per round, and none of drafts."""
    space, sampling = space_of((24,), 4), SamplingParams(temperature=0.7)
    found = {n: run(sampler, space, sampling) for n, sampler in {
        "pearl": pearl(3), "serial": speculative(num_speculative_tokens=3),
    }.items()}  # fmt: skip
    nfe, draft = (
        {n: sum(getattr(s, count) for s in out.stats) for n, out in found.items()}
        for count in ("nfe", "draft_nfe")
    )
    assert draft["pearl"] <= 3 * nfe["pearl"]
    # three draft passes take as long as one of the target: serial rounds take twice as long
    assert nfe["serial"] < nfe["pearl"] < nfe["serial"] + draft["serial"] / 3


@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [4, 2, 7, 1, 0]])
def test_a_row_does_not_depend_on_the_others(rows):
    every = run(pearl(3), rows=list(range(8)))
    some = run(pearl(3), rows=rows)
    assert torch.equal(some.tokens, every.tokens[rows])
    counts = [(s.nfe, s.draft_nfe) for s in every.stats]
    assert [(s.nfe, s.draft_nfe) for s in some.stats] == [counts[r] for r in rows]


def test_follow_gives_the_tokens_of_autoregression():
    assert torch.equal(run(pearl(3, "follow")).tokens, run(autoregressive()).tokens)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"num_speculative_tokens": "auto"}, "is 'auto'; expected a number with the drafter pearl"),
        ({"policy": "heuristic"}, "is 'heuristic'; expected constant with the drafter pearl"),
        ({"shape": "paths", "verifier": "recursive"}, "sampler.shape is 'paths'; expected chain"),
    ],
)
def test_parameters_that_it_does_not_have_are_refused(params, words):
    with pytest.raises(GenError) as caught:
        resolve_sampler({"name": "pearl", **params})
    assert words in str(caught.value)
