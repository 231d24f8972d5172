"""``optimal_acceptance`` is the value of an optimal transport problem, and no verifier beats it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from constraint_bench import CONTEXTS, SAMPLING_CASES, models, speculative
from enumeration import enumerate_distribution
from scipy.optimize import linprog
from tabular import causal_target, space_of

from gen.core.errors import GenError
from gen.samplers.engine.draft import JUDGED as KINDS
from gen.samplers.engine.draft import (
    POSITION,
    RANKS,
    TOP_AND_RANDOM,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
)
from gen.samplers.verifiers.bounds import optimal_acceptance

CLOSE = 1e-5  # of the quadrature


def drafts(q: list[float], k: int, draws: str) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of k drafts, from the definition."""
    size = len(q)
    ranked = sorted(range(size), key=lambda v: -q[v])
    if draws == RANKS:
        return {tuple(ranked[:k]): 1.0}
    if draws == TOP_AND_RANDOM:
        top, rest = ranked[: k - 1], ranked[k - 1 :]
        return {(v, *top): q[v] / sum(q[w] for w in rest) for v in rest}
    found = {}
    for line in product(range(size), repeat=k):
        mass, left = 1.0, 1.0
        for n, v in enumerate(line):
            if draws == WITHOUT_REPLACEMENT and v in line[:n]:
                mass = 0.0
            mass *= q[v] / left
            left -= q[v] if draws == WITHOUT_REPLACEMENT else 0.0
        if mass > 0:
            found[line] = mass
    return found


def best_transport(p: list[float], chances: dict[tuple[int, ...], float]) -> float:
    """Largest Pr(Y in X) over all joint distributions of Y ~ p and the drafts X."""
    lines, size = list(chances), len(p)
    cost = [-float(v in line) for line in lines for v in range(size)]
    rows = np.zeros((len(lines) + size, len(cost)))
    for n, v in product(range(len(lines)), range(size)):
        rows[n, n * size + v] = rows[len(lines) + v, n * size + v] = 1
    answer = linprog(cost, A_eq=rows, b_eq=[*chances.values(), *p])
    assert answer.success
    return -answer.fun


def some(size: int, seed: int) -> list[float]:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed)).double() ** 2 + 0.01
    return (weights / weights.sum()).tolist()


@pytest.mark.parametrize("draws", KINDS)
@pytest.mark.parametrize(("size", "k"), [(3, 1), (3, 2), (3, 3), (4, 2), (5, 2), (4, 3), (5, 3)])
def test_the_bound_is_the_value_of_the_linear_programme(size, k, draws):
    for seed in range(2):
        p, q = some(size, seed), some(size, 50 + seed)
        bound = optimal_acceptance(torch.tensor(p).double(), torch.tensor(q).double(), k, draws)
        wanted = best_transport(p, drafts(q, k, draws))
        assert float(bound) == pytest.approx(wanted, abs=CLOSE), (seed, p, q)


def test_rows_are_bounded_one_by_one():
    p, q = (torch.tensor([some(4, s + n) for s in range(3)]) for n in (0, 9))
    for draws in KINDS:
        whole = optimal_acceptance(p, q, 2, draws)
        alone = [optimal_acceptance(a, b, 2, draws) for a, b in zip(p, q, strict=True)]
        assert torch.allclose(whole, torch.stack(alone))


@pytest.mark.parametrize(
    ("k", "draws", "says"),
    [
        (2, POSITION, "draws is 'position_noise'; expected"),
        (0, RANKS, "k is 0; expected 1 to 4"),
        (5, RANKS, "k is 5; expected 1 to 4"),
    ],
)
def test_what_has_no_bound_is_refused(k, draws, says):
    with pytest.raises(GenError, match=says):
        optimal_acceptance(torch.tensor(some(4, 0)), torch.tensor(some(4, 1)), k, draws)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    ("verifier", "draws"),
    [(v, d) for v in ("recursive", "traversal") for d in KINDS if (v, d) != ("traversal", KINDS[3])]
    + [("k_seq", WITH_REPLACEMENT)],
)
@pytest.mark.thinned(3)
def test_no_verifier_accepts_more(verifier, draws, k):
    """One draft of the target with the most probable tokens and a random one meets its bound."""
    space, sampling = space_of((2,), 4), SAMPLING_CASES["plain"]
    target, small = models(space, sampling)
    sampler = speculative(verifier=verifier, shape="branching", branching=str(k), draws=draws)

    def decode(rng, context):
        now, draft = (causal_target(m, space, sampling, context) for m in (target, small))
        traces = sampler(now, rng, draft=draft, trace=True).traces
        return torch.tensor([[len(trace[0].accepted)] for trace in traces])

    found = enumerate_distribution(decode, CONTEXTS)
    for context, outcome in enumerate(found):
        now, draft = (causal_target(m, space, sampling, [context]) for m in (target, small))
        p, q = (
            t.predict(torch.zeros(1, 1).long(), torch.zeros(1, 1).long()).logprobs[0, 0].exp()
            for t in (now, draft)
        )
        bound = float(optimal_acceptance(p, q, k, draws))
        accepted = outcome.get((1,), 0.0)
        assert 0 < accepted <= bound + CLOSE
        if draws in (RANKS, TOP_AND_RANDOM):
            assert accepted == pytest.approx(bound, abs=1e-12)
        if verifier == "k_seq":
            assert accepted >= (1 - 1 / np.e) * bound
