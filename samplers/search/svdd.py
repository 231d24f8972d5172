"""SVDD: at every step, M candidates from the model's kernel, one of which is kept.

    x_s^1, ..., x_s^M ~ p(x_s | x_t),   x_s = x_s^k,   k ~ softmax(v(x_s^j) / alpha)
    v(x_s)    soft value alpha log E[exp(r(x_0) / alpha) | x_s], of which ``value`` is an estimate:
              None      r of the estimate of the output (posterior mean, PM)
              a scorer  such as a trained value head (Monte Carlo regression, MC) or any function

The kernel is ``block`` forward passes of a masked base, or ``block`` positions of a causal one.

Reference: Li et al., "Derivative-Free Guidance in Continuous and Discrete Diffusion Models with
Soft Value-Based Decoding" (arXiv 2408.08252).
Guarantee: approximate, relative to p(x) exp(r(x) / alpha) / Z; biased at finite M even with the
exact soft value.
Parameters: ``m``, ``alpha`` (0: the candidate of highest value), ``value``, ``block``.
Presets: ``svdd``; ``svdd_greedy``, the argmax of the authors' code, which maximises the reward and
does not sample from the distribution above.
Limit: m = 1 is ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.core.method import method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.search.base import Search
from gen.samplers.search.steering import Level, Rule, SteeringSampler


class SoftValue(Rule):
    """Rule that keeps one candidate of each item."""

    def __init__(self, search: Search, items: int, count: int, alpha: float):
        super().__init__(search, items, count)
        self.alpha = alpha

    def decide(self, level: Level) -> np.ndarray:
        if self.alpha:
            scaled = level.scores / self.alpha
            logp = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
            kept = self.search.choose(logp, "select", level.number, level.items)
        else:
            kept = level.scores.argmax(1)
        return np.repeat(kept[:, None], self.count, axis=1)

    def finish(self, items: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return np.zeros(len(items), dtype=np.int64)  # all particles are copies of the kept one


@method(
    "svdd_greedy",
    about="SVDD that keeps the candidate of highest value",
    sampler="svdd",
    params={"alpha": 0.0},
    paper="2408.08252",
    title="Derivative-Free Guidance in Continuous and Discrete Diffusion Models with Soft"
    " Value-Based Decoding",
)
@register("sampler", "svdd")
@dataclass(frozen=True)
class SVDD(SteeringSampler):
    """Keep one of ``m`` candidates per step, with probability softmax(value / ``alpha``).

    ``m``: candidates per step. ``alpha``: temperature of the choice, in units of the reward; 0
    keeps the candidate of highest value.
    """

    m: int = integer(4, least=1, each="row")
    alpha: float = number(0.2)

    papers = ("2408.08252",)
    reference = "the base's distribution, weighted by exp(reward / alpha)"

    @property
    def num_particles(self) -> int:
        return self.m

    def rule(self, search: Search, items: int) -> Rule:
        return SoftValue(search, items, self.m, self.alpha)
