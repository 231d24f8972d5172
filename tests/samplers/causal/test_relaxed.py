"""Relaxed acceptance: with its parameter at zero it is the exact sampler, token for token; above it
a step is no further from the model's distribution than the verifier's bound says. The distribution
of a step is computed by running the verifier on every outcome."""

from __future__ import annotations

import pytest
import torch
from decoding import decode_causal
from enumeration import distance, enumerate_distribution
from tabular import PROMPTS, TabularCausal, causal_distribution, causal_target, space_of
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.causal.jacobi import JacobiDrafter
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import StepContext
from gen.samplers.verifiers.base import TOKEN, Token
from gen.samplers.verifiers.relaxed import gsd, lantern

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS = len(PROMPTS)
RULES = {
    name: rule
    for name, rule in registry.table("verifier").items()
    if rule.relaxed and not rule.needs_weights  # test_judge.py
}
PARAMETERS = {
    "lantern": (0.05, 0.3, 1.0),
    "lantern_pp": (0.3, 1.0, 4.0),
    "gsd": (1, 3, 5),
    "typical": (0.7, 1.0, 3.0),
    "cool": (0.1, 0.5, 2.0),
    "distance": (1, 2, 5),
    "lexical_unit": (0.4, 0.7, 1.0),
}
COUPLINGS = [
    name for name, c in registry.table("coupling").items() if c.guarantee == "same_distribution"
]
relaxed_acceptance = registry.get("sampler", "relaxed_acceptance")
speculative = registry.get("sampler", "speculative")
jacobi = registry.get("sampler", "speculative_jacobi")


def with_codes(space: TokenSpace) -> TokenSpace:
    """Ids as the values 0, 1, 4, 9 ... of a codebook in one dimension."""
    codes = torch.arange(space.vocab_size)[:, None].float().square()
    return TokenSpace(space.grid, space.vocab_size, space.legal, codebook=codes)


# --- one step


V, MANY = 6, 60
ROW, UNIFORM, POINT = range(3)  # drawn by a model, uniform, and chosen
CODES = torch.tensor([[0.0, 0], [1, 0], [0, 2], [3, 1], [3, 3], [9, 9]])


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """Random p and q [n, 1, V], with zeros, alike in every third pair."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.rand(MANY, 1, V, generator=generator, dtype=torch.float64)

    p, q = draw() ** 3 * (draw() > 0.25), draw() ** 3 * (draw() > 0.25)
    q[::3] = p[::3] * (0.5 + draw()[::3])
    p[..., 0] += 1e-3
    q[..., 1] += 1e-3
    return tuple((x / x.sum(-1, keepdim=True)).log() for x in (p, q))


def drafts_distribution(kind: int, q: Tensor, legal: Tensor) -> Tensor:
    """log of the distribution that drafts of a kind really come from. A point draft is id n mod V
    in case n."""
    if kind == ROW:
        return q
    if kind == UNIFORM:
        return (legal.double() / legal.sum(-1, keepdim=True)).log()
    return torch.nn.functional.one_hot(torch.arange(MANY) % V, V)[:, None].double().log()


def drafts(tokens: Tensor, logq: Tensor, kind: int) -> Draft:
    """Chains of one draft of a kind [n, 1], from distributions [n, 1, V]."""
    exists = torch.ones_like(tokens, dtype=torch.bool)
    guessed = torch.full_like(exists, kind != ROW)
    return Draft(tokens, exists, None if kind == POINT else logq, guessed=guessed)


def step_distribution(verifier: Token, p: Tensor, q: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """The distribution [n, V] of the token that one step commits, and that of its drafts [n, 1,
    V]."""
    legal = (torch.arange(MANY)[:, None, None] + torch.arange(V)) % 4 > 0
    source = drafts_distribution(kind, q, legal)

    def decode(rng, case):
        n, zero = torch.arange(len(case)), torch.zeros(len(case), dtype=torch.long)
        on = torch.ones(len(case), 1, dtype=torch.bool)
        step = StepContext(rng, n, zero, zero, zero[:, None], on)
        tokens = step.categorical(source[case], "draft", on)
        return verifier.verify(step, drafts(tokens, source[case], kind), p[case]).tokens

    out = torch.zeros(MANY, V, dtype=torch.float64)
    for case, sampling in enumerate(enumerate_distribution(decode, MANY)):
        for (token,), mass in sampling.items():
            out[case, token] = mass
    return out, source


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1) / 2


def rules(*names: str):
    """Every rule at every parameter, with and without a codebook where it can do without."""
    for name in names or RULES:
        for r in PARAMETERS[name]:
            if not RULES[name].needs_codebook:
                yield RULES[name](r)
            if name in ("lantern", "lantern_pp", "gsd"):
                yield RULES[name](r, CODES)


@pytest.mark.parametrize("kind", [ROW, UNIFORM, POINT], ids=["row", "uniform", "point"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_a_step_is_no_further_from_the_distribution_than_the_bound(name, kind):
    p, q = distributions(kind)
    moved = 0.0
    for rule in rules(name):
        found, source = step_distribution(rule, p, q, kind)
        off = total_variation(found, p[:, 0].exp())
        bound = rule.bound(p, source)[:, 0]
        assert bool((off <= bound + EXACT).all()), (rule, float((off - bound).max()))
        assert bool((bound <= total_variation(p.exp(), source.exp())[:, 0] + EXACT).all())
        moved = max(moved, float(off.max()))
        r = rule.relaxation  # what the module says in words
        if name in ("lantern_pp", "cool") or (name == "lantern" and kind == POINT):
            assert bool((off <= r + EXACT).all())
    if name == "lexical_unit" and kind != ROW:  # drafts without a probability are verified
        assert moved < EXACT
        return
    assert moved > 0.01, "nothing was relaxed, so nothing was bounded"


def beyond_the_least(rule: Token, p: Tensor, q: Tensor, kind: int) -> float:
    """How far the error of a step is from sum (q f - p)+, the least that any residual reaches; f as
    it is for every id."""
    found, source = step_distribution(rule, p, q, kind)
    excess = torch.zeros(MANY, dtype=torch.float64)
    for x in range(V):
        tokens = torch.full((MANY, 1), x)
        f = rule.chance(drafts(tokens, source, kind), p)[:, 0]
        mass = source[:, 0, x].exp()
        excess += torch.where(mass > 0, mass * f - p[:, 0, x].exp(), 0).clamp_min(0)
    return float((total_variation(found, p[:, 0].exp()) - excess).abs().max())


@pytest.mark.parametrize("kind", [ROW, UNIFORM, POINT], ids=["row", "uniform", "point"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_the_error_of_a_step_is_the_least_for_what_is_accepted(name, kind):
    p, q = distributions(3 + kind)
    assert max(beyond_the_least(rule, p, q, kind) for rule in rules(name)) < EXACT


def test_control_the_residual_of_the_token_verifier_breaks_the_claim_for_clusters(monkeypatch):
    monkeypatch.setattr(gsd.GSD, "residual", Token.residual)
    p, q = distributions(0)
    assert max(beyond_the_least(rule, p, q, ROW) for rule in rules("gsd")) > WRONG


def test_control_a_residual_without_the_neighbours_breaks_the_claim(monkeypatch):
    """What releases of this method do at a rejection: the draft's neighbours are ruled out as
    well."""

    def residual_at(self, tree, logp, column):
        rest = Token.residual_at(self, tree, logp, column).exp()
        near = lantern.nearest_codes(self.codebook, 2)[tree.tokens[:, 0]]  # of the one draft
        return (rest.scatter(-1, near, 0.0) + 1e-300).log()

    monkeypatch.setattr(lantern.Lantern, "residual_at", residual_at)
    p, q = distributions(0)
    beyond = []
    for rule in rules("lantern"):
        found, source = step_distribution(rule, p, q, ROW)
        beyond.append(
            float((total_variation(found, p[:, 0].exp()) - rule.bound(p, source)[:, 0]).max())
        )
    assert max(beyond) > WRONG


def test_where_the_distributions_are_equal_everything_is_accepted_and_the_distribution_kept():
    p, _ = distributions(9)
    for rule in [*rules(), Token()]:
        found, _ = step_distribution(rule, p, p.clone(), ROW)
        assert float(total_variation(found, p[:, 0].exp()).max()) < EXACT


# --- rules in numbers


def credited(rule, p: list[float], x: int, q: list[float] | None = None) -> float:
    draft = drafts(torch.tensor([[x]]), torch.tensor([[q or p]]).double().log(), ROW)
    return float(rule.credit(draft, torch.tensor([[p]]).double().log()).exp())


def test_what_a_draft_is_credited_with():
    p, codes = (
        [0.1, 0.05, 0.3, 0.15, 0.4],
        torch.tensor([[0.0], [1.0], [3.0], [7.0]]),
    )  # the last id is no code
    assert lantern.nearest_codes(codes, 1000).tolist() == [
        [1, 2, 3],
        [0, 2, 3],
        [1, 0, 3],
        [2, 1, 0],
    ]
    assert credited(RULES["lantern"](0.1, codes), p, 0) == pytest.approx(0.1 + 0.05)
    assert credited(RULES["lantern"](0.36, codes), p, 0) == pytest.approx(0.1 + 0.05 + 0.3)
    assert credited(RULES["lantern"](0.36, codes), p, 4) == pytest.approx(0.4)
    assert credited(RULES["lantern_pp"](0.4, codes), p, 2) == pytest.approx(0.3 + 0.05)
    assert credited(RULES["lantern_pp"](0.6, codes), p, 2) == pytest.approx(0.3 + 0.05 + 0.1)
    q = [0.3, 0.1, 0.2, 0.1, 0.3]
    assert credited(RULES["gsd"](1), p, 0, q) == pytest.approx(0.3 * (0.1 + 0.05) / (0.3 + 0.1))
    assert credited(RULES["gsd"](2), p, 0, q) == pytest.approx(
        0.3 * (0.15 + 0.1 + 0.05) / (0.1 + 0.3 + 0.1)
    )
    assert credited(RULES["gsd"](2, codes), p, 0, q) == pytest.approx(
        0.3 * (0.1 + 0.05) / (0.3 + 0.1)
    )  # 3 is too far away
    assert credited(RULES["gsd"](2), p, 3, q) == pytest.approx(
        0.1 * (0.15 + 0.1) / (0.1 + 0.3)
    )  # 2 is twice as likely
    assert credited(RULES["typical"](1.0), p, 0, q) == pytest.approx(0.3)  # 0.3 exp(-H) is 0.0745
    assert credited(RULES["typical"](1.0), p, 1, q) == pytest.approx(0.05)
    assert credited(RULES["typical"](2.0), p, 1, q) == pytest.approx(0.1)
    assert credited(RULES["typical"](0.5), p, 0, q) == pytest.approx(0.1)
    assert credited(RULES["cool"](0.5), p, 0) == pytest.approx(0.15)
    assert credited(RULES["distance"](1), p, 0) == pytest.approx(0.1 + 0.05)
    assert credited(RULES["distance"](2), p, 3) == pytest.approx(0.05 + 0.3 + 0.15 + 0.4)


# --- whole sequences


def runs(sampling: SamplingParams, rows: int = 9):
    """A function sampler -> output, over items with contexts and keys of their own."""
    space = with_codes(space_of((3, 4), 6))
    model, small = TabularCausal.with_params(sampling, 6), TabularCausal.with_params(sampling, 6)
    small.seed = 5
    context = [i % CONTEXTS for i in range(rows)]

    def run(sampler):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        return sampler(target, CounterRNG([7919 * i + 5 for i in range(rows)]), draft=draft)

    return run


SAMPLING_CASES = {
    "plain": SamplingParams(),
    "combined": SamplingParams(temperature=0.7, top_k=4, guidance_scale=2.0),
}


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLING_CASES["plain"], id="plain", marks=pytest.mark.slow),
        pytest.param(SAMPLING_CASES["combined"], id="combined"),
    ],
)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(7)
def test_without_relaxation_the_tokens_are_those_of_the_exact_sampler(name, sampling):
    run = runs(sampling)
    for coupling in COUPLINGS:
        for window in (2, 5):
            params = {"coupling": coupling, "window": window}
            a, b = (
                run(relaxed_acceptance(verifier=name, relaxation=0, **params)),
                run(jacobi(**params)),
            )
            assert torch.equal(a.tokens, b.tokens) and [s.nfe for s in a.stats] == [
                s.nfe for s in b.stats
            ]
    for init in registry.table("initialiser"):
        a = run(
            relaxed_acceptance(verifier=name, relaxation=0, coupling="maximal", window=4, init=init)
        )
        assert torch.equal(a.tokens, run(jacobi(coupling="maximal", window=4, init=init)).tokens)
    for policy, kind in registry.table("length_policy").items():
        if kind.needs_same_tokens or kind.needs_weights:
            continue
        a = run(relaxed_acceptance(verifier=name, relaxation=0, drafter="model", policy=policy))
        assert torch.equal(a.tokens, run(speculative(policy=policy)).tokens)


@pytest.mark.parametrize("name", RULES)
def test_the_exactness_follows_the_parameter(name):
    assert relaxed_acceptance(verifier=name, relaxation=0).guarantee == "same_distribution"
    assert (
        relaxed_acceptance(verifier=name, relaxation=1).guarantee
        == relaxed_acceptance(verifier=name).guarantee
        == "approximate"
    )


def sequence_error(sampler) -> float:
    sampling, space = SamplingParams(), with_codes(space_of((3,), 3))
    model, small = TabularCausal(3), TabularCausal(3, seed=5)

    def decode(rng, context):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        return sampler(target, rng, draft=draft).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    return max(
        distance(found[c], causal_distribution(model, space, sampling, c)) for c in range(CONTEXTS)
    )


@pytest.mark.parametrize(
    "drafter",
    [{"coupling": c} for c in COUPLINGS] + [{"drafter": "model"}],
    ids=lambda d: "-".join(d.values()),
)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(7)
def test_relaxation_accepts_more_and_changes_the_distribution(name, drafter):
    param = {"lantern": 0.5, "gsd": 3, "distance": 1, "lexical_unit": 0.7}.get(name)

    def make(r, **more):
        return relaxed_acceptance(
            verifier=name, relaxation=r, num_speculative_tokens=2, **drafter, **more
        )

    assert sequence_error(make(0, window=3)) < EXACT
    assert sequence_error(make(param, window=3)) > WRONG
    run = runs(SamplingParams(), 48)
    calls = [sum(s.nfe for s in run(make(r, window=5)).stats) for r in (0, param)]
    assert calls[1] < calls[0]


class NeverTheFirst(Token):
    """In the first round the first draft is never accepted and the others always are. Exact: the
    residual of f = 0 is p itself, and what the others' coins say may not count for anything."""

    first = True

    def chance(self, draft, logp):
        exact = super().chance(draft, logp)
        if not self.first:
            return exact
        self.first = False
        out = torch.ones_like(exact)
        out[:, 0] = 0.0
        self.reject = True
        return out

    def residual(self, logq, logp):
        if self.reject:
            self.reject = False
            return logp
        return super().residual(logq, logp)


def never_the_first(coupling: str) -> float:
    sampling, space = SamplingParams(), space_of((4,), 2)
    model = TabularCausal(2)

    def decode(rng, context):
        part = registry.get("coupling", coupling)(NeverTheFirst())
        target = causal_target(model, space, sampling, context)
        init = registry.get("initialiser", "uniform")(target)
        drafter = JacobiDrafter(target, 3, part, init)
        return decode_causal(target, rng, drafter).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    return max(
        distance(found[c], causal_distribution(model, space, sampling, c)) for c in range(CONTEXTS)
    )


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_next_iterate_is_exact_whatever_the_verifier(coupling):
    assert never_the_first(coupling) < EXACT


def test_control_the_next_iterate_is_kept_by_relaxed_coins(monkeypatch):
    maximal = registry.get("coupling", "maximal")
    redraft = maximal.redraft

    def relaxed(self, step, draft, past, kept, chance, following):
        with monkeypatch.context() as patch:
            patch.setattr(type(TOKEN), "chance", lambda *_: chance)  # taken for the exact one
            return redraft(self, step, draft, past, kept, chance, following)

    monkeypatch.setattr(maximal, "redraft", relaxed)
    assert never_the_first("maximal") > WRONG


# --- mistakes


@pytest.mark.parametrize("name", ["lantern", "lantern_pp"])
def test_a_missing_codebook_is_named_in_one_line(name):
    target = causal_target(TabularCausal(3), space_of((3,), 3), SamplingParams(), [0])
    with pytest.raises(GenError, match="compare the vectors of codes") as caught:
        relaxed_acceptance(verifier=name)(target, CounterRNG([1]))
    assert "\n" not in str(caught.value)
