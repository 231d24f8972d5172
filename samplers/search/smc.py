"""SMC: particles of an item are weighted by their value and resampled while they are decoded.

    log w_j += lam (v(x_s^j) - v(x_(s-1)^j))           at every level
    a_1, ..., a_P ~ systematic(w),  w = 1              at every level, or where ESS < P / 2
    log w_j += lam r(x_0^j) - sum of the terms so far  of a finished particle
    out = x^k,  k ~ w;   Z^ = product of mean weights

    ESS = (sum_j w_j)^2 / sum_j w_j^2;  v is ``value``, or ``scorer`` on the estimate of the output

Between two resamplings weights are carried on. Resampling happens within an item. The kernel is
``block`` forward passes of a masked base, or ``block`` positions of a causal one.

References: Del Moral, Doucet & Jasra, "Sequential Monte Carlo samplers" (JRSS B 68, 2006); Wu et
al., "Practical and Asymptotically Exact Conditional Sampling in Diffusion Models" (arXiv
2306.17775); for language models, Lew et al. (arXiv 2306.03081).
Guarantee: approximate, relative to p(x) exp(lam r(x)) / Z. E[Z^] = Z for any P and any values; the
distribution of the output is right for P -> infinity.
Parameters: ``particles``, ``lam``, ``resample``, ``select``, ``value``, ``block``.
Presets: ``smc``; ``smc_adaptive``, which resamples where ESS < P / 2.
Limit: particles = 1 or lam = 0 is ``base``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gen.core.method import method
from gen.core.params import choice, integer, number
from gen.core.registry import register
from gen.samplers.search.base import Search
from gen.samplers.search.resampling import WeightedParticles, Weighting
from gen.samplers.search.steering import Rule, SteeringSampler


@method(
    "smc_adaptive",
    about="SMC that resamples where the effective sample size is below half of the particles",
    sampler="smc",
    params={"resample": "ess"},
    paper="2306.03081",
    title="Sequential Monte Carlo Steering of Large Language Models using Probabilistic Programs",
)
@register("sampler", "smc")
@dataclass(frozen=True)
class SMC(SteeringSampler):
    """Weight ``particles`` of every item by exp(``lam`` value) and resample them.

    ``particles``: particles of an item. ``lam``: inverse temperature of the reward. ``resample``:
    ``every`` level, or ``ess``, where the effective sample size is below half of the particles.
    ``select``: ``draw`` a particle by its weight, or take the ``best`` one.
    """

    particles: int = integer(4, least=1, each="row")
    lam: float = number(5.0)
    resample: str = choice("every", ("every", "ess"))
    select: str = choice("draw", ("draw", "best"))

    papers = ("2306.17775", "2306.03081")
    aliases: ClassVar[Mapping[str, str]] = {"lambda": "lam", "num_particles": "particles"}
    reference = "the base's distribution, weighted by exp(lam reward)"

    @property
    def num_particles(self) -> int:
        return self.particles

    def rule(self, search: Search, items: int) -> Rule:
        weighting = Weighting(self.lam, adaptive=self.resample == "ess", select=self.select)
        return WeightedParticles(search, items, self.particles, weighting)
