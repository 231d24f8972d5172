"""Samplers of latents with the embedded architecture, tiny and in float64: what every one of them
must do, and the targets.

Whatever decodes latents is found through the registry, as in ``test_contracts``.
"""

from __future__ import annotations

import pytest
import torch
from latent_bench import CHANNELS, POSITIONS, ROWS, SPACE, SPECS, TARGET, WORDS, run, target_of
from torch import Tensor

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.denoising_path import noise_size, walk


def test_all_samplers_of_latents_are_here():
    assert {
        "autoregressive",
        "continuous_jacobi",
        "continuous_speculative",
        "masked_iterative",
        "cspd",
        "mar",
    } <= set(SPECS)
    samplers = [resolve_sampler(spec)[0] for spec in SPECS.values()]
    assert all("latents" in s.kinds for s in samplers) and len({type(s) for s in samplers}) >= 4


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.thinned(7)
def test_contract(name):
    sampler, _ = resolve_sampler(SPECS[name])
    calls: list[dict[str, int]] = []
    out = run(sampler, trace=True, callback=calls.append)
    assert out.tokens.shape == (ROWS, POSITIONS, CHANNELS) and out.tokens.dtype == torch.float64
    assert bool(out.tokens.isfinite().all()) and not bool((out.tokens == 0).all(-1).any())
    assert torch.allclose(out.tokens, run(sampler).tokens, rtol=0, atol=1e-12), (
        "equal keys gave different latents, or tracing changes them"
    )
    for rows in ([0], [3, 1]):
        assert torch.allclose(run(sampler, rows).tokens, out.tokens[rows], atol=1e-9, rtol=0), (
            "a row depends on its batch"
        )
    same = run(sampler, [2] * 4, [11, 12, 13, 11]).tokens
    assert (
        torch.allclose(same[0], same[3], rtol=0, atol=1e-12)
        and float(torch.pdist(same[:3].flatten(1)).min()) > 1e-3
    )
    assert float((same[0] - same[1]).abs().min()) > 1e-9, "some places do not depend on the key"
    for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
        state: dict[int, list[float]] = {}
        for step in trace:
            assert set(step.accepted) <= set(step.committed) <= set(step.window) and not set(
                step.committed
            ) & set(state)
            state |= step.committed
        assert [state[n] for n in range(POSITIONS)] == out.tokens[row].tolist(), (
            "the trace does not replay to the latents"
        )
        assert stats.tokens == POSITIONS
        if sampler.wraps:  # its costs are those of all candidates, its trace that of one
            assert len(trace) <= stats.nfe + (stats.draft_nfe or 0)
        else:
            assert len(trace) == stats.nfe <= POSITIONS
        assert (stats.draft_nfe is not None) == sampler.drafted
        if stats.acceptance_histogram:
            assert (
                sum(stats.acceptance_histogram) == stats.nfe
                and 0 <= stats.draft_acceptance_rate <= 1
            )
    if sampler.wraps:
        assert calls and all(0 <= c["done"] <= c["total"] for c in calls)
    else:
        assert calls[-1]["done"] == calls[-1]["total"] == ROWS * POSITIONS


def test_drafts_are_accepted_and_rejected_here():
    """Or the contract would hold of little."""
    for name in ("exact-3", "relaxed-3", "jacobi-3-1.0"):
        stats = run(resolve_sampler(SPECS[name])[0], [0, 1, 2, 3] * 5, list(range(20))).stats
        taken = sum(sum(k * n for k, n in enumerate(s.acceptance_histogram)) for s in stats)
        assert 0.1 < taken / (20 * POSITIONS) < 0.75, name


def test_jacobi_at_tolerance_zero_is_autoregression():
    expected = run(resolve_sampler("autoregressive")[0]).tokens
    for window in (1, 2, 4, 16):
        for init in ("repeat", "zeros"):
            spec = {"name": "continuous_jacobi", "window": window, "tolerance": 0.0, "init": init}
            assert torch.allclose(run(resolve_sampler(spec)[0]).tokens, expected, atol=1e-9, rtol=0)


# --- the targets


@pytest.mark.parametrize("seed", range(4))
def test_a_causal_target_agrees_with_the_full_forward_under_ragged_acceptance(seed):
    """Rows commit different numbers of latents, rejected drafts are overwritten, finished rows
    leave."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(ROWS, POSITIONS, CHANNELS, dtype=torch.float64, generator=g)
    target, rows, start = (
        target_of("causal", list(range(ROWS))),
        torch.arange(ROWS),
        torch.zeros(ROWS, dtype=torch.long),
    )
    with torch.no_grad():
        expected = torch.stack([TARGET(WORDS, truth), TARGET(torch.full_like(WORDS, 7), truth)], 2)
    while len(rows):
        width = min(int(torch.randint(1, 5, (), generator=g)), POSITIONS - int(start.min()))
        positions = start[:, None] + torch.arange(width)
        valid = positions < POSITIONS
        positions = torch.where(valid, positions, start[:, None])
        given = truth[rows[:, None], (positions - 1).clamp_min(0)]
        wrong = (torch.rand(valid.shape, generator=g) < 0.4) & valid
        wrong[:, 0] = False
        given[wrong] = torch.randn(int(wrong.sum()), CHANNELS, dtype=torch.float64, generator=g)
        sampling = target.predict(given, positions).logprobs
        right = (~wrong).long().cumprod(1).bool()
        assert torch.allclose(
            sampling[right], expected[rows[:, None], positions][right], atol=1e-9, rtol=0
        )
        start = start + torch.minimum(
            (right & valid).sum(1), torch.randint(1, 4, rows.shape, generator=g)
        )
        left = start < POSITIONS
        if not bool(left.all()):
            rows, start = rows[left], start[left]
            target.keep(left)


def test_a_guided_path_distribution_is_that_of_guided_predictions():
    """Mean and deviation of a step, by hand: u + s (c - u), and the temperature on the
    deviation."""
    target = target_of("causal", [0, 1])
    x, z = torch.randn(2, 2, CHANNELS).double(), torch.randn(2, 2, 16).double()
    with torch.no_grad():
        mean, log_sigma = target.paths.transition(x[0], 1, z)
        c, u = TARGET.head.predict(x[0], 1, z[:, 0]), TARGET.head.predict(x[0], 1, z[:, 1])
        by_hand, plain = TARGET.head.posterior(x[0], 1, u + 1.5 * (c - u))
    assert torch.allclose(mean, by_hand) and torch.allclose(log_sigma.exp(), 0.9 * plain.exp())


# --- masked


def masked(**params):
    return resolve_sampler({"name": "masked_iterative", "schedule": "linear", **params})[0]


@pytest.mark.parametrize("order", ["raster", "halton"])
def test_one_place_per_step_is_filling_one_after_the_other(order):
    out = run(masked(order=order, steps=POSITIONS), trace=True)
    sequence = [n for step in out.traces[0] for n in step.committed]
    assert all(len(step.committed) == 1 for t in out.traces for step in t)
    assert (sequence == list(range(POSITIONS))) == (order == "raster")
    target, canvas = target_of("masked", list(range(ROWS))), SPACE.empty(ROWS, dtype=torch.float64)
    positions = torch.arange(POSITIONS).expand(ROWS, -1)
    noise = CounterRNG([31 * r + 7 for r in range(ROWS)]).normal(
        torch.arange(ROWS), positions, "propose", None, noise_size(target.paths)
    )
    for n in sequence:
        sampling = target.predict(canvas).logprobs
        canvas[:, n] = walk(target.paths, sampling[:, n], noise[:, n])[:, -1]
    assert torch.allclose(out.tokens, canvas, atol=1e-9, rtol=0)
    assert not torch.allclose(run(masked(order=order, steps=2)).tokens, canvas, atol=1e-3)


def canvas_of() -> Tensor:
    """Rows with all, some, one and no places to fill; an empty place holds NaN."""
    canvas = torch.randn(
        ROWS, POSITIONS, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    canvas[0], canvas[1, ::2], canvas[2, 5] = float("nan"), float("nan"), float("nan")
    return canvas


@pytest.mark.parametrize("order", ["random", "halton", "raster"])
def test_a_canvas_keeps_what_it_holds(order):
    canvas = canvas_of()
    out = run(masked(order=order, steps=2), canvas=canvas, trace=True)
    known = ~canvas.isnan()
    assert torch.equal(canvas[known], canvas_of()[known]) and torch.equal(canvas.isnan(), ~known)
    assert torch.equal(out.tokens[known], canvas[known]) and bool(out.tokens.isfinite().all())
    assert [s.tokens for s in out.stats] == [6, 3, 1, 0] and out.stats[3].nfe == 0
    for row in range(ROWS):
        alone = run(masked(order=order, steps=2), [row], canvas=canvas[row : row + 1]).tokens[0]
        assert torch.allclose(alone, out.tokens[row], atol=1e-9, rtol=0)
    # what it holds is looked at
    other = canvas.clone()
    other[1, 1] += 1
    assert not torch.allclose(
        run(masked(order=order, steps=2), canvas=other).tokens[1, 0], out.tokens[1, 0], atol=1e-6
    )


def test_mistakes_are_named_in_one_line():
    with pytest.raises(GenError, match="the probability of a token; latents have none"):
        run(masked(order="confidence"))
    with pytest.raises(GenError, match="shape"):
        run(masked(), canvas=canvas_of()[:, :5])
    for param, value in (("temperature", 0.0), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.1)):
        with pytest.raises(GenError, match=f"sampling.{param} is"):
            target_of("causal", [0], SamplingParams(**{param: value}))
