"""Samplers of latents on models in closed form: distributions by Kolmogorov and Smirnov on 20,000
items, samples by equality.

Given the latents before it, a latent of these models is a Gaussian; so what a sampler made,
standardised with the moments that its own prefix implies, must be independent standard normal
numbers. Controls are samplers that are broken on purpose.
"""

from __future__ import annotations

import math

import pytest
import torch
from continuous import LinearHead, LinearLatent, ks, latent_target, teacher_forced
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.denoising_path import log_density, noise_size, walk
from gen.samplers.engine.draft import Verdict
from gen.samplers.latent import continuous_speculative, path_verifiers
from gen.samplers.latent.continuous_jacobi import LatentJacobiDrafter
from gen.samplers.latent.path_verifiers import AlignedPaths, ExactPaths, align

ITEMS, FITS, BROKEN = 20_000, 1e-3, 1e-9
autoregressive = registry.get("sampler", "autoregressive")
jacobi = registry.get("sampler", "continuous_jacobi")
speculative = registry.get("sampler", "continuous_speculative")


def models(sigmas=(0.6,), channels=1, ratio=1.4, shift=0.3):
    """A target, and a draft whose transitions have other means and standard deviations ``ratio``
    times as large."""
    target = LinearLatent(LinearHead(channels, sigmas), memory=0.8, bend=0.4)
    draft = LinearHead(channels, tuple(ratio * s for s in sigmas), turn=0.2, shift=shift)
    return target, LinearLatent(draft, memory=0.7, bend=0.4)


def run(
    sampler,
    target,
    draft=None,
    positions=3,
    items=ITEMS,
    sampling: SamplingParams | None = None,
    **kwargs,
):
    context = [2] * items
    second = None if draft is None else latent_target(draft, positions, context, sampling)
    return sampler(
        latent_target(target, positions, context, sampling),
        CounterRNG([7919 * i + 11 for i in range(items)]),
        draft=second,
        **kwargs,
    )


def standardised(model: LinearLatent, latents: Tensor, temperature: float = 1.0) -> Tensor:
    mean, deviation = model.head.moments(
        teacher_forced(model, latents, [2] * len(latents)), temperature
    )
    return (latents - mean) / deviation


def fit(e: Tensor) -> float:
    """The least of the probabilities that e [N, T, C] is that far from standard normal numbers:
    each of them, random projections of all, and the correlations of them and of their squares."""
    e = e.flatten(1)
    size = e.shape[1]
    directions = torch.randn(size, 8, dtype=e.dtype, generator=torch.Generator().manual_seed(0))
    found = [ks(x) for x in torch.cat([e, e @ (directions / directions.norm(dim=0))], 1).unbind(1)]
    for x in (e, e.square()):
        if size > 1:
            r = torch.corrcoef(x.T)[torch.ones(size, size).triu(1).bool()]
            found.append(float(2 * torch.special.ndtr(-r.abs().max() * math.sqrt(len(e)))) * len(r))
    return min(found)


# --- continuous speculative decoding, exact

PATHS = {
    "1-step": ((0.6,), 1),
    "3-step": ((0.7, 0.6, 0.5), 1),
    "1-step-2d": ((0.6,), 2),
    "3-step-2d": ((0.7, 0.6, 0.5), 2),
}


def test_ks_by_hand():
    x = torch.special.ndtri((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    assert ks(x) > 0.999 and ks(x + 0.3) < BROKEN and ks(1.3 * x) < FITS
    critical = torch.special.ndtri(
        (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000 * (1 - 0.0429)
    )  # a distance of 0.0424
    assert ks(critical) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(("sigmas", "channels"), PATHS.values(), ids=PATHS)
@pytest.mark.thinned(2)
def test_the_target_alone_has_the_distribution_in_closed_form(sigmas, channels):
    target, draft = models(sigmas, channels)
    tokens = run(autoregressive(), target).tokens
    assert fit(standardised(target, tokens)) > FITS
    assert fit(standardised(draft, tokens)) < BROKEN


@pytest.mark.parametrize("ratio", [0.7, 1.4])
@pytest.mark.parametrize(("sigmas", "channels"), PATHS.values(), ids=PATHS)
@pytest.mark.thinned(4)
def test_exact_mode_has_the_distribution_of_the_target(sigmas, channels, ratio):
    target, draft = models(sigmas, channels, ratio)
    out = run(speculative(num_speculative_tokens=2), target, draft)
    assert fit(standardised(target, out.tokens)) > FITS
    accepted = sum(sum(k * n for k, n in enumerate(s.acceptance_histogram)) for s in out.stats)
    assert 0.05 < accepted / (3 * ITEMS) < 0.8  # drafts and residuals are both in it


@pytest.mark.parametrize(("policy", "drafts"), [("constant", 1), ("constant", 4), ("heuristic", 2)])
def test_exact_mode_for_other_chains_and_a_temperature(policy, drafts):
    target, draft = models((0.7, 0.5), 2)
    sampler = speculative(num_speculative_tokens=drafts, policy=policy, draft_temperature=1.1)
    tokens = run(sampler, target, draft, 4, sampling=SamplingParams(temperature=0.8)).tokens
    assert fit(standardised(target, tokens, 0.8)) > FITS
    assert fit(standardised(target, tokens)) < BROKEN


def test_equal_models_accept_everything():
    target, _ = models((0.7, 0.5), 2)
    for mode in ("exact", "relaxed"):
        out = run(speculative(mode=mode, prefill_ratio=0.0), target, target, 10, 2000)
        assert {s.draft_acceptance_rate for s in out.stats} == {1.0} and {
            s.nfe for s in out.stats
        } == {2}
        assert fit(standardised(target, out.tokens)) > FITS


def draws_from_the_target(monkeypatch):
    monkeypatch.setattr(ExactPaths, "residual", ExactPaths.own)


def inverts_the_ratio(monkeypatch):
    compare = ExactPaths.compare
    monkeypatch.setattr(ExactPaths, "compare", lambda *args: -compare(*args))


def keeps_drafts_after_a_rejection(monkeypatch):
    """Every rejected draft is replaced by itself; those after it stay."""

    def verify(self, step, draft, sampling):
        drafts, drafted = draft.tokens, draft.exists
        wrong = drafted & ~self.kept(step, drafted, sampling)
        chosen = torch.cat([drafts, drafts.new_zeros(len(drafts), 1, drafts.shape[-1])], 1)
        if bool(wrong.any()):
            chosen[wrong.nonzero(as_tuple=True)] = self.residual(
                step, *wrong.nonzero(as_tuple=True), sampling
            )
        count, row = drafted.sum(1), torch.arange(len(sampling))
        chosen[row, count] = self.own(step, row, count, sampling)
        return Verdict(count, chosen)

    monkeypatch.setattr(ExactPaths, "verify", verify)


@pytest.mark.parametrize(
    "breaks", [draws_from_the_target, inverts_the_ratio, keeps_drafts_after_a_rejection]
)
@pytest.mark.parametrize("paths", ["1-step", "3-step-2d"])
def test_control_a_broken_rule_has_another_distribution(monkeypatch, paths, breaks):
    breaks(monkeypatch)
    target, draft = models(*PATHS[paths])
    assert (
        fit(standardised(target, run(speculative(num_speculative_tokens=2), target, draft).tokens))
        < BROKEN
    )


def test_few_tries_stay_within_the_bound():
    """R (1 - R)^(K + 1), with R the share of rejected drafts; the distance of Kolmogorov is never
    above it."""
    target, draft = models((0.6,), ratio=1.4, shift=1.0)
    away = {}
    for tries in (1, 3, 1000):
        out = run(speculative(num_speculative_tokens=1, max_tries=tries), target, draft, 2)
        first = out.tokens[:, 0]
        assert bool(out.tokens.isfinite().all()) and not bool((out.tokens == 0).any())
        rejected = 1 - sum(s.acceptance_histogram[1] for s in out.stats) / ITEMS
        assert 0.3 < rejected < 0.6
        x = torch.special.ndtr(standardised(target, out.tokens)[:, 0, 0].sort().values)
        away[tries] = float((x - (torch.arange(len(first)) + 0.5) / len(first)).abs().max())
        bound = rejected * (1 - rejected) ** (tries + 1)
        assert bound < 1 / (math.e * (tries + 1))
        assert away[tries] < bound + 1.6 / math.sqrt(
            ITEMS
        )  # the second: a distance of chance, exceeded once in 80 times
    assert away[1] > away[3] > 0.015 > away[1000]  # there is something to bound


@pytest.mark.parametrize("ratio", [1.0, 0.1])
def test_distributions_that_are_far_apart_do_not_underflow(ratio):
    target, draft = models((0.6,), ratio=ratio, shift=30.0)
    for mode in ("exact", "relaxed"):
        out = run(speculative(num_speculative_tokens=2, mode=mode), target, draft, 3, 5000)
        assert {s.draft_acceptance_rate for s in out.stats} == {0.0}
        assert fit(standardised(target, out.tokens)) > FITS


def test_how_many_tries_are_computed_at_once_changes_nothing(monkeypatch):
    target, draft = models((0.7, 0.6), 2)
    many = [run(speculative(mode=m), target, draft, 5, 300).tokens for m in ("exact", "relaxed")]
    monkeypatch.setattr(path_verifiers, "BLOCK", 1)
    for a, m in zip(many, ("exact", "relaxed"), strict=True):
        assert torch.allclose(a, run(speculative(mode=m), target, draft, 5, 300).tokens, atol=1e-12)


# --- continuous speculative decoding, relaxed


def test_the_relaxed_ratio_is_that_of_two_aligned_paths():
    """Target's path with its end replaced by the draft, over draft's path: what one noise for both
    leaves of that."""
    target, draft = models((0.7, 0.6, 0.2), 2, ratio=1.7)
    p, q = (latent_target(m, 1, [0]).paths for m in (target, draft))
    z, w, noise = torch.randn(
        3, 50, 1, 2 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)
    z, w, noise = z[..., :2], w[..., :2], noise[:, 0, : noise_size(p)]
    ours, theirs = walk(p, z, noise), walk(q, w, noise)
    x = theirs[:, -1]
    moved = torch.cat([ours[:, :-1], x[:, None]], 1)
    expected = log_density(p, moved, z) - log_density(q, theirs, w)
    last, other = align(p, z, noise), align(q, w, noise)
    assert torch.equal(last.end, ours[:, -1])
    exponent = sum(
        sign * ((x - path.mean) / path.log_sigma.exp()).square().sum(-1) / 2
        for path, sign in ((last, -1), (other, 1))
    )
    for relaxation in (0.0, 0.75, 1 - 1 / 42**2, 1.0):
        found = AlignedPaths(p, q, 1, relaxation).compare(x, last, other)
        assert torch.allclose(found, expected - relaxation * exponent, atol=1e-9)
    assert float(expected.std()) > 1 and float((expected - exponent).abs().min()) > 0.1


def test_scales_that_differ_reject_drafts_however_flat_the_exponents_are():
    """The released rule accepts 0.886 of such drafts; flattened as a whole it was 0.9999."""
    target, draft = (LinearLatent(LinearHead(16, (s, s))) for s in (0.6, 0.59))
    p, q = (latent_target(m, 1, [0]).paths for m in (target, draft))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(400, 1, 16, dtype=torch.float64, generator=generator)
    noise = torch.randn(400, noise_size(p), dtype=torch.float64, generator=generator)
    last, other = align(p, z, noise), align(q, z, noise)
    flat = AlignedPaths(p, q, 1, 1 - 1 / 42**2)
    chance = flat.compare(other.end, last, other).clamp_max(0).exp()
    assert float(chance.mean()) == pytest.approx((0.59 / 0.6) ** 32, abs=0.02)
    assert float(chance.max()) < 0.7


@pytest.mark.parametrize("ratio", [0.7, 1.4])
def test_relaxed_mode_is_exact_for_one_step_and_not_for_more(ratio):
    sampler = speculative(mode="relaxed", num_speculative_tokens=2, prefill_ratio=0.0)
    for sigmas, right in (((0.6,), True), ((0.7, 0.6, 0.5), False)):
        target, draft = models(sigmas, 2, ratio)
        p = fit(standardised(target, run(sampler, target, draft).tokens))
        assert p > FITS if right else p < BROKEN


def test_relaxed_mode_with_equal_models_gives_the_samples_of_the_target():
    target, draft = models((0.7, 0.5), 2)
    alone = run(autoregressive(), target, None, 8, 40).tokens
    for relaxation in (0.0, 0.9):
        sampler = speculative(mode="relaxed", relaxation=relaxation)
        out = run(sampler, target, target, 8, 40)
        assert torch.allclose(out.tokens, alone, atol=1e-9) and {
            s.draft_acceptance_rate for s in out.stats
        } == {1.0}
        assert not torch.allclose(run(sampler, target, draft, 8, 40).tokens, alone, atol=1e-2)


def test_relaxation_raises_acceptance_to_everything_where_the_scales_are_equal():
    target, draft = models((0.7, 0.5), 2)
    rates = []
    for relaxation in (0.0, 0.5, 0.9, 1.0):
        stats = run(speculative(mode="relaxed", relaxation=relaxation), target, draft, 8, 300).stats
        rates.append(sum(s.draft_acceptance_rate for s in stats) / len(stats))
    assert rates == sorted(rates) and rates[0] < 0.8 and rates[-1] == 1.0


def test_the_first_places_are_the_targets_alone():
    target, draft = models((0.7, 0.5), 2)
    alone = run(autoregressive(), target, None, 8, 20).tokens
    out = run(speculative(mode="relaxed", prefill_ratio=1.0), target, draft, 8, 20)
    assert (
        torch.allclose(out.tokens, alone, atol=1e-12)
        and draft.calls == 0
        and {s.draft_nfe for s in out.stats} == {0}
    )
    out = run(
        speculative(mode="relaxed", prefill_ratio=0.5, relaxation=1.0),
        target,
        draft,
        8,
        20,
        trace=True,
    )
    assert (
        torch.allclose(out.tokens[:, :4], alone[:, :4], atol=1e-12) and draft.calls == 3
    )  # then 3 drafts and the last place
    assert not torch.allclose(out.tokens[:, 4], alone[:, 4], atol=1e-3)
    assert all([s.window for s in t] == [[0], [1], [2], [3], [4, 5, 6, 7]] for t in out.traces)
    none = run(speculative(mode="relaxed", prefill_ratio=0.0, relaxation=1.0), target, draft, 8, 20)
    assert not torch.allclose(none.tokens[:, 0], alone[:, 0], atol=1e-3)


# --- continuous Jacobi


def three(sampler, model, positions=11, **kwargs):
    """Three items with contexts of different lengths."""
    return sampler(latent_target(model, positions, [0, 1, 2]), CounterRNG([5, 6, 7]), **kwargs)


@pytest.mark.parametrize("init", ["repeat", "zeros"])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_jacobi_at_tolerance_zero_is_autoregression(window, init):
    for memory in (0.1, 0.8):
        model = LinearLatent(LinearHead(2, (0.5, 0.4)), memory, bend=0.5)
        out = three(jacobi(window=window, tolerance=0.0, init=init), model, trace=True)
        assert torch.allclose(out.tokens, three(autoregressive(), model).tokens, atol=1e-9, rtol=0)
        assert all(s.nfe <= 11 for s in out.stats)
        for row, trace in enumerate(out.traces):
            replayed = {n: x for step in trace for n, x in step.committed.items()}
            assert [replayed[n] for n in range(11)] == out.tokens[row].tolist()


@pytest.mark.parametrize("window", [1, 4, 16])
def test_a_tolerance_bounds_every_place_given_those_before(window):
    model = LinearLatent(LinearHead(2, (0.5, 0.4)), memory=0.25, bend=0.5)
    cost = []
    for tolerance in (0.0, 0.02, 0.1, 0.5):
        out = three(jacobi(window=window, tolerance=tolerance), model)
        target, rng, positions = (
            latent_target(model, 11, [0, 1, 2]),
            CounterRNG([5, 6, 7]),
            torch.arange(11),
        )
        noise = rng.normal(
            torch.arange(3), positions.expand(3, -1), "token", None, noise_size(target.paths)
        )
        z = teacher_forced(model, out.tokens, [0, 1, 2])[:, :, None]
        moved = (walk(target.paths, z, noise)[..., -1, :] - out.tokens).abs().amax()
        assert float(moved) <= tolerance + 1e-12
        assert (window > 1 and tolerance > 0.02) or float(moved) <= 0.02 + 1e-12
        cost.append(sum(s.nfe for s in out.stats))
    assert cost == sorted(cost, reverse=True) and (
        cost[-1] < 0.7 * 33 if window > 1 else cost == [33] * 4
    )


def test_weak_dependence_takes_few_calls():
    model = LinearLatent(LinearHead(2, (0.5, 0.4)), memory=0.02)
    assert max(s.nfe for s in three(jacobi(window=11), model).stats) <= 3


@pytest.mark.parametrize("window", [2, 5])
def test_control_noise_of_the_round_gives_other_latents(monkeypatch, window):
    def values(self, step, sampling):
        return walk(
            self.paths, sampling, step.normal("token", noise_size(self.paths), sampling.shape[1])
        )[..., -1, :]

    monkeypatch.setattr(LatentJacobiDrafter, "values", values)
    model = LinearLatent(LinearHead(2, (0.5, 0.4)))
    found = three(jacobi(window=window, tolerance=0.0), model).tokens
    assert not torch.allclose(found, three(autoregressive(), model).tokens, atol=1e-3)


# --- what is refused


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"name": "continuous_jacobi", "window": 0}, "sampler.window is 0; expected"),
        ({"name": "continuous_jacobi", "tolerance": -0.1}, "sampler.tolerance is -0.1; expected"),
        (
            {"name": "continuous_jacobi", "tolerance": float("nan")},
            "sampler.tolerance is nan; expected",
        ),
        ({"name": "continuous_jacobi", "init": "repeet"}, "Did you mean 'repeat'"),
        ({"name": "continuous_speculative", "mode": "exakt"}, "Did you mean 'exact'"),
        ({"name": "continuous_speculative", "max_tries": 0}, "sampler.max_tries is 0; expected"),
        (
            {"name": "continuous_speculative", "relaxation": 1.5},
            "sampler.relaxation is 1.5; expected",
        ),
        (
            {"name": "continuous_speculative", "prefill_ratio": True},
            "sampler.prefill_ratio is True; expected",
        ),
        ({"name": "continuous_speculative", "policy": "confidence"}, "a latent has no probability"),
        (
            {"name": "cspd", "num_speculative_tokens": 0},
            "sampler.num_speculative_tokens is 0; expected",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(spec, said):
    with pytest.raises(GenError) as error:
        resolve_sampler(spec)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_draft_model_must_fit():
    target, draft = models((0.7, 0.5))
    for wrong, positions, said in (
        (None, 3, "got none"),
        (models((0.7,))[1], 3, "paths have 1 steps; expected the target's 2"),
        (models((0.7, 0.5), 2)[1], 3, "2 channels; expected the target's 1"),
        (draft, 4, "positions"),
    ):
        second = None if wrong is None else latent_target(wrong, positions, [0])
        with pytest.raises(GenError, match=said):
            speculative()(latent_target(target, 3, [0]), CounterRNG([1]), draft=second)


def test_declarations():
    def said(spec):
        return resolve_sampler(spec)[0].guarantee

    assert (
        said("continuous_speculative") == "same_distribution"
        and said("cspd") == said("continuous_jacobi") == "approximate"
    )
    assert said({"name": "continuous_jacobi", "tolerance": 0}) == "same_tokens"
    assert set(continuous_speculative.MODES) == {"exact", "relaxed"}
