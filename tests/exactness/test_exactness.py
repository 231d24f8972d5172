"""What samplers promise about the distribution, computed exactly: their production code is run on
every outcome of its draws.

Errors of correct samplers are around 1e-16. The controls break one part each and must miss by more
than 1e-3, so the test would see what is wrong in most public implementations of these methods.
"""

from __future__ import annotations

import itertools
import math
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from enumeration import Noise, ScriptedRNG, distance, enumerate_distribution, hashed
from tabular import (
    EMPTY,
    PROMPTS,
    TabularCausal,
    TabularMasked,
    causal_distribution,
    causal_target,
    masked_distribution,
    masked_target,
    space_of,
)

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal import couplings
from gen.samplers.causal import jacobi as speculative_jacobi
from gen.samplers.engine.draft import Verdict
from gen.samplers.verifiers import base as verifiers

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS = len(PROMPTS)
COMBINED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guidance": SamplingParams(guidance_scale=2.0),
    "temperature_top_k": SamplingParams(temperature=0.7, top_k=2),
    "combined": COMBINED,
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
}
DISTRIBUTION_COUPLINGS = [
    name for name, c in registry.table("coupling").items() if c.guarantee == "same_distribution"
]
autoregressive = registry.get("sampler", "autoregressive")
jacobi = registry.get("sampler", "speculative_jacobi")
masked_iterative = registry.get("sampler", "masked_iterative")


def causal_error(sampler, sampling: SamplingParams, space: TokenSpace, **prompts) -> float:
    """The largest error of a probability, over three contexts that are decoded in one ragged
    batch."""
    model = TabularCausal.with_params(sampling, space.vocab_size)
    small = TabularCausal(model.vocab_size, 5, model.low, model.spread)

    def decode(rng, context):
        target, draft = (
            causal_target(m, space, sampling, context, **prompts) for m in (model, small)
        )
        return sampler(target, rng, draft=draft if sampler.drafted else None).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    expected = [causal_distribution(model, space, sampling, c, **prompts) for c in range(CONTEXTS)]
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in expected), (
        "the distribution is too simple to test anything"
    )
    assert distance(expected[0], expected[1]) > WRONG, (
        "contexts must differ, or mixing up rows would go unseen"
    )
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


# --- the harness itself


def test_one_distribution_asked_of_shared_noise_is_that_distribution():
    p = torch.tensor([0.3, -1.0, 1.2, 0.1], dtype=torch.float64).softmax(0)
    chances, _ = Noise.unknown(4).split(tuple(p.tolist()))
    assert max(abs(a - b) for a, b in zip(chances, p.tolist(), strict=True)) < 1e-15
    chances, parts = Noise.unknown(3).split((0.25, 0.0, 0.75))
    assert chances == pytest.approx([0.25, 0.0, 0.75], abs=1e-15)
    assert parts[0].split((0.25, 0.0, 0.75))[0] == pytest.approx(
        [1.0, 0.0, 0.0], abs=1e-15
    )  # the same answer again


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.8), (0.8, 0.3), (0.5, 0.5), (0.1, 0.999)])
def test_two_distributions_asked_of_shared_noise_in_closed_form(a, b):
    """For two ids the joint of the answers is the comonotone one: both are 0 with probability
    min(a, b)."""
    chances, parts = Noise.unknown(2).split((a, 1 - a))
    joint = [chances[i] * x for i in range(2) for x in parts[i].split((b, 1 - b))[0]]
    assert joint == pytest.approx(
        [min(a, b), max(a - b, 0), max(b - a, 0), 1 - max(a, b)], abs=1e-15
    )


def test_shared_noise_against_gumbel_samples():
    distributions = torch.tensor(
        [[0.5, 0.2, 0.3], [0.1, 0.7, 0.2], [0.3, 0.3, 0.4]], dtype=torch.float64
    )
    uniform = torch.rand(
        200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    gumbel = -torch.log(-torch.log(uniform))
    i, j, k = ((p.log() + gumbel).argmax(-1) for p in distributions)
    sampled = torch.bincount(9 * i + 3 * j + k, minlength=27) / len(gumbel)
    exact = []
    first, parts = Noise.unknown(3).split(tuple(distributions[0].tolist()))
    for a in range(3):
        second, inner = parts[a].split(tuple(distributions[1].tolist()))
        for b in range(3):
            third = inner[b].split(tuple(distributions[2].tolist()))[0] if second[b] else [0.0] * 3
            exact += [first[a] * second[b] * x for x in third]
    assert math.fsum(exact) == pytest.approx(1, abs=1e-14)
    assert (sampled - torch.tensor(exact)).abs().max() < 0.005  # four standard errors
    independent = (
        distributions[0][:, None, None] * distributions[1][None, :, None] * distributions[2]
    ).flatten()
    assert (independent - torch.tensor(exact)).abs().max() > 0.05  # what the cones are for


def test_the_harness_refuses_noise_used_twice():
    rng = ScriptedRNG([(0, ())])
    row, at, on, half = (
        torch.tensor([0]),
        torch.tensor([[2]]),
        torch.tensor([[True]]),
        torch.tensor([[0.5]]),
    )
    rng.flip(half, row, at, "accept", torch.tensor([0]), on)
    rng.flip(half, row, at, "accept", torch.tensor([1]), on)
    with pytest.raises(AssertionError, match="share their noise"):
        rng.flip(half, row, at, "accept", torch.tensor([1]), on)


# --- causal samplers


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
def test_autoregressive_distribution(sampling):
    assert causal_error(autoregressive(), sampling, space_of((4,), 3)) < EXACT


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(9)
def test_jacobi_distribution_for_every_window(coupling, window):
    """Of four tokens; the widest window has two ids to keep the number of outcomes small."""
    sampling, ids = (
        (COMBINED, 3) if window < 4 else (SamplingParams(temperature=0.7, guidance_scale=2.0), 2)
    )
    assert (
        causal_error(jacobi(coupling=coupling, window=window), sampling, space_of((2, 2), ids))
        < EXACT
    )


@pytest.mark.parametrize("init", registry.table("initialiser"))
@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(5)
def test_jacobi_distribution_for_every_initialiser(coupling, init):
    """A draft model that corrects the iterate has many more outcomes; three tokens are enough."""
    sampler = jacobi(coupling=coupling, window=3, init=init)
    grid = (3,) if sampler.drafted else (2, 2)
    assert causal_error(sampler, COMBINED, space_of(grid, 3)) < EXACT


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(9)
def test_jacobi_distribution_for_every_distribution(coupling, sampling):
    assert causal_error(jacobi(coupling=coupling, window=3), sampling, space_of((3,), 3)) < EXACT


@pytest.mark.parametrize("init", registry.table("initialiser"))
@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(9)
def test_jacobi_distribution_where_legal_ids_depend_on_the_place(coupling, init):
    legal = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    space = TokenSpace((3,), 4, legal)
    assert (
        causal_error(jacobi(coupling=coupling, window=3, init=init), SamplingParams(), space)
        < EXACT
    )


@pytest.mark.parametrize(
    "sampler", [autoregressive(), jacobi(window=2)], ids=["autoregressive", "jacobi"]
)
def test_guided_prompts_may_end_differently(sampler):
    """The unconditional half is conditioned on its own last token, not on the conditional
    prompt's."""
    empty = ((21, 22), (23,), (21, 24, 25))
    assert (
        causal_error(sampler, SamplingParams(guidance_scale=2.0), space_of((3,), 3), empty=empty)
        < EXACT
    )


# --- controls: each breaks one part of production code


class StaleDistributions(speculative_jacobi.JacobiDrafter):
    """Drafts kept past the first rejection keep the distribution they were first drawn from,
    instead of q := p."""

    def verify(self, step, draft, output):
        old, drafted, logp = copy(draft), draft.exists, output.logprobs
        verdict = super().verify(step, draft, output)
        accepted, ids = verdict.num_accepted, verdict.tokens
        width, length = ids.shape[1], drafted.shape[1]
        source = accepted[:, None] + 1 + torch.arange(width)
        at = source.clamp_max(length - 1)
        kept = (source < length) & drafted.gather(1, at)
        kept &= ids.gather(1, source.clamp_max(width - 1)) == old.tokens.gather(1, at)
        self.logq[kept] = old.logq.gather(1, at[..., None].expand(-1, -1, logp.shape[-1]))[kept]
        self.guessed[kept] = old.guessed.gather(1, at)[kept]
        return verdict


class LockStep(speculative_jacobi.JacobiDrafter):
    """All rows advance by the smallest accepted count, here by a row of the batch that never
    accepts. What was accepted beyond is offered again with q := p, which is exact."""

    stale = False

    def verify(self, step, draft, output):
        old, length, logp = copy(draft), draft.tokens.shape[1], output.logprobs
        verdict = super().verify(step, draft, output)
        accepted, ids = verdict.num_accepted, verdict.tokens
        self.tokens, self.logq = ids[:, 1:], logp[:, 1:].clone()
        self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.num_carried = (step.valid.sum(1) - 1).clamp_min(0)
        if self.stale:
            again = torch.arange(1, length) < accepted[:, None]
            self.logq[:, : length - 1][again] = old.logq[:, 1:][again]
            self.guessed[:, : length - 1][again] = old.guessed[:, 1:][again]
        return Verdict(torch.zeros_like(accepted), ids)


class StaleLockStep(LockStep):
    """... with the distribution they had before they were accepted."""

    stale = True


def test_lock_step_itself_is_exact(monkeypatch):
    monkeypatch.setattr(speculative_jacobi, "JacobiDrafter", LockStep)
    for coupling in DISTRIBUTION_COUPLINGS:
        assert (
            causal_error(jacobi(coupling=coupling, window=3), SamplingParams(), space_of((3,), 3))
            < EXACT
        )


@pytest.mark.parametrize("coupling", DISTRIBUTION_COUPLINGS)
def test_control_lock_step_with_stale_distributions(monkeypatch, coupling):
    monkeypatch.setattr(speculative_jacobi, "JacobiDrafter", StaleLockStep)
    assert (
        causal_error(jacobi(coupling=coupling, window=3), SamplingParams(), space_of((3,), 3))
        > WRONG
    )


def test_control_stale_distributions_of_kept_drafts(monkeypatch):
    monkeypatch.setattr(speculative_jacobi, "JacobiDrafter", StaleDistributions)
    assert (
        causal_error(jacobi(coupling="maximal", window=3), SamplingParams(), space_of((4,), 3))
        > WRONG
    )


@pytest.mark.parametrize("coupling", DISTRIBUTION_COUPLINGS)
def test_control_residual_warped_again(monkeypatch, coupling):
    def warped(*args, _true=verifiers.Token.residual):
        return (_true(*args) / 0.7).log_softmax(-1)

    monkeypatch.setattr(verifiers.Token, "residual", warped)
    assert (
        causal_error(
            jacobi(coupling=coupling, window=3), SamplingParams(temperature=0.7), space_of((3,), 3)
        )
        > WRONG
    )


@pytest.mark.parametrize("coupling", DISTRIBUTION_COUPLINGS)
def test_control_residual_replaced_by_the_distribution(monkeypatch, coupling):
    monkeypatch.setattr(verifiers.Token, "residual", lambda self, proposal, logp: logp)
    assert (
        causal_error(jacobi(coupling=coupling, window=3), SamplingParams(), space_of((3,), 3))
        > WRONG
    )


# --- the same tokens


def tabular_runs(items: int, sampling: SamplingParams):
    """A function sampler -> tokens, over items with contexts and keys of their own."""
    space = space_of((3, 4), 6)
    model = TabularCausal.with_params(sampling, 6)
    keys = [7919 * i + 5 for i in range(items)]
    context = [i % CONTEXTS for i in range(items)]
    small = TabularCausal(6, 5, model.low, model.spread)

    def run(sampler):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        return sampler(target, CounterRNG(keys), draft=draft if sampler.drafted else None)

    return run


def tiny_llama(codes: int = 6, grid=(3, 4), prefix: int = 3, seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    config = GridLlamaConfig(
        grid=grid,
        prefix_length=prefix,
        codebook_size=codes,
        vocab_size=codes + 4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
    )
    return CausalLM(GridLlamaForCausalLM(config).double())


def llama_runs(items: int, sampling: SamplingParams):
    model = tiny_llama()
    space = TokenSpace.codes((3, 4), 6, 10)
    prompt = torch.tensor([[6 + i % 3, 6 + i // 3 % 3, 9] for i in range(items)])
    uncond = torch.tensor([[9, 9, 9]] * items)
    keys = [104729 * i + 3 for i in range(items)]
    small = tiny_llama(seed=1)

    def run(sampler):
        target, draft = (CausalTarget(m, prompt, space, sampling, uncond) for m in (model, small))
        return sampler(target, CounterRNG(keys), draft=draft if sampler.drafted else None)

    return run


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.thinned(3)
def test_gumbel_gives_the_tokens_of_autoregression(sampling):
    run = tabular_runs(60, sampling)
    expected = run(autoregressive())
    assert len(expected.tokens.unique(dim=0)) > 10
    for window in (1, 2, 3, 5, 12, 40):
        for init in registry.table("initialiser"):
            found = run(jacobi(coupling="gumbel", window=window, init=init))
            assert torch.equal(found.tokens, expected.tokens), (window, init)
    assert sum(s.nfe for s in found.stats) < sum(s.nfe for s in expected.stats)


@pytest.mark.parametrize("coupling", registry.table("coupling"))
def test_a_window_of_one_is_plain_autoregression(coupling):
    """Nothing is drafted, so every coupling gives the tokens of autoregression; a wider window need
    not."""
    run = tabular_runs(30, SamplingParams())
    expected = run(autoregressive()).tokens
    assert torch.equal(run(jacobi(coupling=coupling, window=1)).tokens, expected)
    assert torch.equal(run(jacobi(coupling=coupling, window=4)).tokens, expected) == (
        coupling not in DISTRIBUTION_COUPLINGS
    )


@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(2)
def test_at_temperature_zero_every_coupling_gives_the_argmax_tokens(coupling):
    """Distributions of one id leave no choice: whatever is drafted, verified and redrawn."""
    run = tabular_runs(30, SamplingParams(temperature=0.0))
    expected = run(autoregressive()).tokens
    for window in (1, 2, 4, 12):
        for init in registry.table("initialiser"):
            found = run(jacobi(coupling=coupling, window=window, init=init))
            assert torch.equal(found.tokens, expected), (window, init)


def test_gumbel_gives_the_tokens_of_autoregression_with_the_embedded_architecture():
    run = llama_runs(12, SamplingParams(guidance_scale=2.0, top_k=5))
    expected = run(autoregressive())
    assert len(expected.tokens.unique(dim=0)) > 6
    for window in (1, 2, 4, 12):
        for init in registry.table("initialiser"):
            found = run(jacobi(coupling="gumbel", window=window, init=init))
            assert torch.equal(found.tokens, expected.tokens), (window, init)


@pytest.mark.parametrize("runs", [tabular_runs, llama_runs])
def test_control_noise_of_the_round_gives_other_tokens(monkeypatch, runs):
    """Still the right distribution, no longer the same tokens."""

    def step(self, now, drafts, logp, next_logprobs):
        ids = now.categorical(logp, "token", now.valid)
        same = (ids[:, : drafts.tokens.shape[1]] == drafts.tokens) & drafts.exists
        return Verdict(couplings.num_accepted(same), ids)

    monkeypatch.setattr(couplings.Gumbel, "step", step)
    run = runs(12, SamplingParams())
    assert not torch.equal(
        run(jacobi(coupling="gumbel", window=4)).tokens, run(autoregressive()).tokens
    )
    assert (
        causal_error(jacobi(coupling="gumbel", window=3), SamplingParams(), space_of((3,), 3))
        < EXACT
    )


def test_autoregression_is_the_argmax_of_distribution_and_noise_of_the_place():
    sampling, space, model = COMBINED, space_of((3, 4), 6), TabularCausal.with_params(COMBINED, 6)
    rng = CounterRNG([77])
    tokens = autoregressive()(causal_target(model, space, sampling, [1]), rng).tokens[0].tolist()
    for n in range(space.length):
        logp = sampling(
            model.after([*PROMPTS[1], *tokens[:n]]),
            model.after([*EMPTY[1], *tokens[:n]]),
            space.legal[n],
        )
        at = torch.tensor([[n]])
        assert (
            int(rng.categorical(logp[None, None], torch.tensor([0]), at, "token", None, at == n))
            == tokens[n]
        )


# --- masked samplers


def masked_error(sampler, sampling: SamplingParams, space: TokenSpace) -> float:
    model = TabularMasked.with_params(sampling, space.vocab_size)

    def decode(rng, context):
        return sampler(masked_target(model, space, sampling, context), rng).tokens

    found = enumerate_distribution(decode, CONTEXTS)

    def order(context: int) -> list[int]:
        positions = range(space.length)
        if sampler.order == "random":
            return sorted(positions, key=lambda n: -hashed(context, n, "order", None))
        return list(registry_order(sampler.order, space.grid))

    expected = [masked_distribution(model, space, sampling, c, order(c)) for c in range(CONTEXTS)]
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


def registry_order(name: str, grid: tuple[int, ...]) -> list[int]:
    """The places in the order in which they are committed, for orders that depend on nothing
    else."""
    positions = torch.arange(math.prod(grid))[None]
    now = SimpleNamespace(
        positions=positions,
        rows=positions[0, :1],
        space=SimpleNamespace(grid=grid),
        constant=lambda name, make: torch.as_tensor(make()),
    )
    score = registry.get("order", name)(now)
    return score[0].argsort(descending=True).tolist()


@pytest.mark.parametrize("sampling", [SamplingParams(), COMBINED], ids=["plain", "combined"])
@pytest.mark.parametrize("order", ["random", "halton", "raster"])
@pytest.mark.parametrize(("grid", "ids"), [((3,), 3), ((2, 2), 2)])
@pytest.mark.thinned(3)
def test_one_place_per_step_is_sequential_decoding(order, grid, ids, sampling):
    sampler = masked_iterative(steps=math.prod(grid), order=order, schedule="linear")
    assert masked_error(sampler, sampling, space_of(grid, ids, masked=True)) < EXACT


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("order", ["random", "halton", "raster"])
def test_control_several_places_per_step_are_not(order, steps):
    sampler = masked_iterative(steps=steps, order=order, schedule="linear")
    assert masked_error(sampler, SamplingParams(), space_of((3,), 3, masked=True)) > WRONG


def committed_per_step(sampler, grid) -> list[int]:
    space = space_of(grid, 3, masked=True)
    out = sampler(
        masked_target(TabularMasked(4), space, SamplingParams(), [0]), CounterRNG([1]), trace=True
    )
    return [len(step.committed) for step in out.traces[0]]


def test_cosine_commits_what_maskgit_commits():
    assert committed_per_step(masked_iterative(steps=8, schedule="cosine"), (16, 16)) == [
        5,
        15,
        24,
        31,
        39,
        45,
        48,
        49,
    ]
    assert committed_per_step(masked_iterative(steps=8, schedule="linear"), (16, 16)) == [32] * 8


@pytest.mark.parametrize("schedule", registry.table("schedule"))
def test_schedules_fall_from_one_to_zero(schedule):
    share = registry.get("schedule", schedule)
    values = share(torch.arange(51, dtype=torch.float64) / 50, 2.0).tolist()
    assert values[0] == pytest.approx(1) and values[-1] == pytest.approx(0, abs=1e-15)
    assert all(a > b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("grid", [(5,), (4, 4), (16, 16), (3, 7), (2, 3, 4)])
def test_halton_visits_every_cell_once_and_spreads(grid):
    cells = registry_order("halton", grid)
    assert sorted(cells) == list(range(math.prod(grid)))
    if grid == (
        16,
        16,
    ):  # the first 16 cells: one in each quarter row and quarter column, nearly; raster has one row
        assert len({(c // 64, c % 16 // 4) for c in cells[:16]}) >= 12
