"""Rows that end early: they cost nothing after it, statistics and traces stop there, and Jacobi
iterates never hold an end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from constrained import ends_at, with_end
from constraint_bench import (
    CONTEXTS,
    COUPLINGS,
    EXACT,
    INITS,
    WRONG,
    autoregressive,
    error,
    jacobi,
    models,
    run,
    speculative,
)
from tabular import TabularCausal, causal_target

from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.causal import jacobi as speculative_jacobi
from gen.samplers.causal.initialisers import base as initialisers
from gen.samplers.causal.jacobi import JacobiDrafter


class Watched(JacobiDrafter):
    """Notes how often it drafts the end though something else may stand there, and how often
    anything."""

    ends = drafts = 0

    def __init__(self, target, *rest):
        super().__init__(target, *rest)
        self.target = target

    def propose(self, step, tokens):
        draft = super().propose(step, tokens)
        drafts, drafted = draft.tokens, draft.exists
        other = self.target.legal[step.positions[:, : drafts.shape[1]]].sum(-1) > 1
        Watched.ends += int((drafted & other & (drafts == self.target.space.eos_token_id)).sum())
        Watched.drafts += int(drafted.sum())
        return draft


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(3)
def test_jacobi_never_drafts_an_end(monkeypatch, coupling, init):
    monkeypatch.setattr(speculative_jacobi, "JacobiDrafter", Watched)
    for control in (False, True):
        Watched.ends = Watched.drafts = 0
        if control:
            for module in (speculative_jacobi, initialisers):
                monkeypatch.setattr(module, "without_ends", lambda logprobs, ends: logprobs)
        run(jacobi(coupling=coupling, init=init, window=5), with_end(12, ids=4))
        assert Watched.drafts > 100 and (Watched.ends > 0) == control


class DistributionWithTheEnd(JacobiDrafter):
    """Takes its drafts, which are never the end, for draws from a distribution that knows one."""

    def verify(self, step, draft, output):
        logp, verdict = output.logprobs, super().verify(step, draft, output)
        accepted = verdict.num_accepted
        at = (accepted[:, None] + 1 + torch.arange(logp.shape[1])).clamp_max(logp.shape[1] - 1)
        self.logq = logp.gather(1, at[..., None].expand_as(logp))
        return verdict


@pytest.mark.parametrize("coupling", [c for c in COUPLINGS if c != "gumbel"])
def test_control_drafts_without_an_end_are_not_from_the_distribution_with_one(
    monkeypatch, coupling
):
    assert error(jacobi(coupling=coupling, window=3), with_end(4)) < EXACT
    monkeypatch.setattr(speculative_jacobi, "JacobiDrafter", DistributionWithTheEnd)
    assert error(jacobi(coupling=coupling, window=3), with_end(4)) > WRONG


class Counting(TabularCausal):
    """Notes how many rows its calls had."""

    def forward(self, tokens, positions, cache):
        self.calls.append(len(tokens))
        return super().forward(tokens, positions, cache)


def test_a_row_costs_no_call_after_its_end():
    space, rows = with_end(12, ids=4), 30
    model = Counting(4, low=0.0, spread=1.5)
    model.calls = []
    out = autoregressive()(
        causal_target(model, space, SamplingParams(), [r % CONTEXTS for r in range(rows)]),
        CounterRNG(range(rows)),
    )
    positions = [ends_at(ids, 3) for ids in out.tokens.tolist()]
    assert min(positions) < 3 and len(set(positions)) > 4
    assert [s.nfe for s in out.stats] == [s.tokens for s in out.stats] == positions
    assert all(s.mean_acceptance_length == 1.0 for s in out.stats)
    assert sum(model.calls) == sum(positions), "rows that are over were computed"


def test_control_without_an_end_every_place_costs_a_call():
    out = autoregressive()(
        causal_target(
            TabularCausal(4), replace(with_end(12, ids=4), eos_token_id=None), SamplingParams(), [0]
        ),
        CounterRNG([1]),
    )
    assert out.stats[0].nfe == out.stats[0].tokens == 12


@pytest.mark.parametrize(
    "sampler",
    [
        autoregressive(),
        *(jacobi(coupling=c, window=5) for c in COUPLINGS),
        speculative(num_speculative_tokens=3),
        speculative(num_speculative_tokens=3, policy="heuristic"),
    ],
    ids=lambda s: getattr(s, "coupling", type(s).__name__),
)
def test_traces_and_statistics_of_rows_that_end(sampler):
    space = with_end(12, ids=4)
    calls: list[dict] = []
    out = run(
        sampler,
        space,
        trace=True,
        callback=lambda info: calls.append(
            {k: v.clone() if torch.is_tensor(v) else v for k, v in info.items()}
        ),
    )
    for ids, stats, trace in zip(out.tokens.tolist(), out.stats, out.traces, strict=True):
        state: dict[int, int] = {}
        for n, step in enumerate(trace):
            assert not set(step.committed) & set(state) and set(step.accepted) <= set(
                step.committed
            )
            fill = set(step.committed) - set(step.window)
            assert not fill or (n == len(trace) - 1 and all(step.committed[k] == 3 for k in fill))
            state |= step.committed
        assert [state[n] for n in range(12)] == ids and len(state) == 12
        assert stats.tokens == ends_at(ids, 3) and stats.nfe == len(trace) <= stats.tokens
        assert stats.mean_acceptance_length == pytest.approx(stats.tokens / stats.nfe)
        accepted = sum(len(s.accepted) for s in trace)
        assert accepted <= stats.tokens
        if stats.acceptance_histogram:
            assert sum(k * n for k, n in enumerate(stats.acceptance_histogram)) == accepted
            assert 0 <= stats.draft_acceptance_rate <= 1
    for info in calls:  # a row that is over is done, whatever its batch still does
        over = (info["tokens"] == 3).logical_and(info["known"]).any(1)
        assert bool(info["known"][over].all()) and bool((info["tokens"][info["known"]] >= 0).all())
        assert info["done"] == int(info["known"].sum())
    assert calls[-1]["done"] == calls[-1]["total"] == 20 * 12
    assert any(s.tokens < 12 for s in out.stats), "no row has ended"


def test_a_draft_behind_the_end_counts_neither_way():
    """A target that is its own draft is always right, and its chains are as good behind an end as
    before it."""
    space, sampling = with_end(12, ids=4), SamplingParams()
    model = models(space, sampling)[0]
    target, draft = (
        causal_target(model, space, sampling, [r % CONTEXTS for r in range(20)]) for _ in range(2)
    )
    out = speculative(num_speculative_tokens=5)(target, CounterRNG(range(20)), draft=draft)
    drafted = [s for s in out.stats if s.acceptance_histogram]
    assert drafted and all(s.draft_acceptance_rate == 1.0 for s in drafted)
    assert any(s.tokens < 12 and s.tokens != 6 for s in drafted)
