"""FK steering: particles are resampled by a potential of the values along their paths.

    G_s     exp(lam (v_s - v_(s-1)))          diff
            exp(lam max(v_0, ..., v_s))       max
            exp(lam (v_0 + ... + v_s))        add
            exp(lam v_s)                      rt
    w_j     product of G_s since the last resampling; exp(lam r(x)) / product of all G_s at the end
    a_j     ~ w, independently (multinomial) or systematic, every ``block``
    out     the particle of highest reward (best), or one drawn by its weight (draw)

Every potential is paid back at the end: the terminal weight holds the reward of the output, and not
the highest one or the sum of the path, so all potentials have the same target. A resampling that is
skipped (``adaptive``) carries the weights on.

Reference: Singhal et al., "A General Framework for Inference-time Scaling and Steering of Diffusion
Models" (arXiv 2501.06848).
Guarantee: approximate, relative to p(x) exp(lam r(x)) / Z where ``select`` is ``draw``; ``best``
maximises the reward.
Parameters: ``particles``, ``lam``, ``potential``, ``resampling``, ``adaptive``, ``select``,
``value``, ``block``, which is the paper's resampling interval.
Presets: ``fk``; ``fk_max``, ``fk_add``, ``fk_rt``, with the other potentials.
Limit: particles = 1 or lam = 0 is ``base``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gen.core.method import method
from gen.core.params import choice, flag, integer, number
from gen.core.registry import register
from gen.samplers.search.base import Search
from gen.samplers.search.resampling import POTENTIALS, WeightedParticles, Weighting
from gen.samplers.search.steering import Rule, SteeringSampler

PAPER: dict[str, Any] = {
    "sampler": "fk",
    "paper": "2501.06848",
    "title": "A General Framework for Inference-time Scaling and Steering of Diffusion Models",
}


@method(
    "fk_max", about="FK steering by the highest value so far", params={"potential": "max"}, **PAPER
)
@method(
    "fk_add", about="FK steering by the sum of all values", params={"potential": "add"}, **PAPER
)
@method("fk_rt", about="FK steering by the newest value", params={"potential": "rt"}, **PAPER)
@register("sampler", "fk")
@dataclass(frozen=True)
class FK(SteeringSampler):
    """Resample ``particles`` of every item by a potential of their values.

    ``particles``: particles of an item. ``lam``: inverse temperature of the reward. ``potential``:
    ``diff``, ``max``, ``add`` or ``rt``. ``resampling``: ``multinomial`` or ``systematic``.
    ``adaptive``: resample only where the effective sample size is below half of the particles.
    ``select``: take the ``best`` particle, or ``draw`` one by its weight.
    """

    particles: int = integer(4, least=1, each="row")
    lam: float = number(10.0)
    potential: str = choice("diff", tuple(POTENTIALS))
    resampling: str = choice("multinomial", ("multinomial", "systematic"))
    adaptive: bool = flag(False)
    select: str = choice("best", ("best", "draw"))

    papers = ("2501.06848",)
    aliases: ClassVar[Mapping[str, str]] = {
        "lambda": "lam",
        "lmbda": "lam",
        "num_particles": "particles",
        "potential_type": "potential",
        "adaptive_resampling": "adaptive",
        "resample_frequency": "block",
    }
    reference = "the base's distribution, weighted by exp(lam reward)"

    @property
    def num_particles(self) -> int:
        return self.particles

    def rule(self, search: Search, items: int) -> Rule:
        weighting = Weighting(self.lam, self.potential, self.resampling, self.adaptive, self.select)
        return WeightedParticles(search, items, self.particles, weighting)
