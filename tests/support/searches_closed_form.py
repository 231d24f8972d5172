"""Searches on models in closed form: an evaluator whose media are the tokens themselves, and the
laws that searches are compared with.

A scorer is anything that ``read_scorer`` takes. A function gets (tokens, prompt): the tokens of an
output as a tuple, and the number of its context as the prompt. ``Judged`` gets what is decided too.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from enumeration import enumerate_distribution
from tabular import TabularCausal, TabularMasked, causal_target, masked_target

from gen.contracts.scorer import Sample, Scorer, checked_scores
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
PLAIN = SamplingParams()


class TokenEvaluator:
    """Evaluator of a closed-form target (``gen.contracts.scorer.Evaluator``): media are token
    tuples, or tuples of tuples for latents.

    ``contexts``: context of every item, which scorers see as the prompt; None: the item's number.
    """

    def __init__(self, contexts: Sequence[int] | None = None):
        self.contexts = contexts
        self.judged = 0  # outputs so far

    def scores(self, scorer, tokens, items, known=None) -> np.ndarray:
        if not len(tokens):
            return np.zeros(0)
        self.judged += len(tokens)
        modality: Any = SimpleNamespace(name="tokens")
        samples = []
        for row, item in enumerate(items.tolist()):
            context = item if self.contexts is None else self.contexts[item]
            decided = None if known is None else known[row].cpu()
            media = as_tuple(tokens[row])
            samples.append(
                Sample(media, tokens[row].cpu(), str(context), None, modality, item, decided)
            )
        return checked_scores(scorer, samples)

    def answers(self, tokens, items) -> list[Hashable]:
        return [as_tuple(row) for row in tokens]


def as_tuple(tokens) -> tuple:
    """The tokens [T] of an output as a tuple; latents [T, C] as one of tuples."""
    ids = tokens.tolist()
    return tuple(ids) if tokens.ndim == 1 else tuple(map(tuple, ids))


@dataclass(frozen=True)
class Judged(Scorer):
    """Scorer of partial outputs: ``function`` gets the tokens with None where one is undecided."""

    function: Callable[[tuple], float]

    def score(self, samples):
        return [self.function(partial(s)) for s in samples]


def partial(sample: Sample) -> tuple:
    """The tokens of a sample, None at undecided positions."""
    if sample.known is None:
        return sample.media
    return tuple(
        token if is_known else None
        for token, is_known in zip(sample.media, sample.known.tolist(), strict=True)
    )


def judged_target(space, context, sampling=PLAIN, model=None, masked=False):
    """A production target on a closed-form model that has an evaluator; row i has context
    ``context[i]``."""
    if model is None:
        model = (TabularMasked if masked else TabularCausal)(space.vocab_size, low=0.0)
    make = masked_target if masked else causal_target
    target = make(model, space, sampling, list(context))
    target.evaluator = TokenEvaluator(list(context))
    return target


def search_law(spec: Any, space, contexts=1, masked=False, model=None, draft=None, **more):
    """The law of a search in every context, by running its production code on every outcome."""
    sampler = resolve_sampler(spec)[0]

    def decode(rng, context):
        target = judged_target(space, context, PLAIN, model, masked)
        drafts = None if draft is None else judged_target(space, context, PLAIN, draft)
        return sampler(target, rng, draft=drafts).tokens

    return enumerate_distribution(decode, contexts, **more)


def best_of_law(law: Law, reward: Mapping[Tokens, float], n: int) -> Law:
    """p(x) (F(r)^n - F(r-)^n) / (F(r) - F(r-)), r = r(x)."""
    out = {}
    for x, p in law.items():
        below = math.fsum(q for y, q in law.items() if reward[y] < reward[x])
        ties = math.fsum(q for y, q in law.items() if reward[y] == reward[x])
        out[x] = p * ((below + ties) ** n - below**n) / ties
    return out


def tilted(law: Law, reward: Callable[[Tokens], float], strength: float) -> tuple[Law, float]:
    """p(x) exp(strength r(x)) / Z, and Z."""
    mass = {x: p * math.exp(strength * reward(x)) for x, p in law.items()}
    total = math.fsum(mass.values())
    return {x: m / total for x, m in mass.items()}, total


def selected_law(
    kernel: Callable[[Any], Mapping[Any, float]],
    value: Callable[[Any], float],
    start: Any,
    levels: int,
    m: int,
    alpha: float,
) -> dict[Any, float]:
    """The law of keeping one of ``m`` independent candidates at every level, with probability
    softmax(value / alpha): the closed enumeration of ``svdd`` at finite M.

    Args:
        kernel: state -> law of the state one level on.
        value: value of a state.
        start: state before the first level.
        levels: number of levels.
        m: candidates per level.
        alpha: temperature of the choice; 0 keeps the first one of highest value.
    """
    law = {start: 1.0}
    for _ in range(levels):
        found: dict[Any, list[float]] = {}
        for state, mass in law.items():
            for drawn in itertools.product(kernel(state).items(), repeat=m):
                chance = mass * math.prod(p for _, p in drawn)
                v = [value(x) for x, _ in drawn]
                if alpha:
                    w = np.exp((np.array(v) - max(v)) / alpha)
                    shares = (w / w.sum()).tolist()
                else:
                    shares = [float(k == int(np.argmax(v))) for k in range(m)]
                for (x, _), share in zip(drawn, shares, strict=True):
                    found.setdefault(x, []).append(chance * share)
        law = {x: math.fsum(parts) for x, parts in found.items()}
    return law


def total_variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Half of the sum of absolute differences."""
    return sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in one.keys() | other.keys()) / 2


def estimates_of_z(sampler: Any, space, reward, contexts=1, masked=False, rule=None, model=None):
    """For every context, E[Z^ 1{out = x}] of every output x, by enumeration of production code.

    Args:
        sampler: search whose rule has ``log_z``.
        space: token space.
        reward: reward of a token tuple, which the test's closed form has too.
        contexts: number of contexts.
        masked: whether the base is masked.
        rule: makes the rule in place of the sampler's own, from (search, items).
        model: model in closed form.
    """
    rules = []
    make = sampler.rule if rule is None else rule

    def noted(search, items):
        rules.append(make(search, items))
        return rules[-1]

    def decode(rng, context):
        rules.clear()
        target = judged_target(space, context, PLAIN, model, masked)
        watched = copy.copy(sampler)
        object.__setattr__(watched, "rule", noted)
        tokens = watched(target, rng).tokens
        return torch.cat([tokens.double(), torch.from_numpy(rules[0].log_z)[:, None]], 1)

    found = []
    for law in enumerate_distribution(decode, contexts):
        sums: dict[Tokens, list[float]] = {}
        for (*x, log_z), p in law.items():
            sums.setdefault(tuple(int(k) for k in x), []).append(p * math.exp(log_z))
        found.append({x: math.fsum(parts) for x, parts in sums.items()})
    return found
