"""Relaxed acceptance: a verifier that lets more drafts pass, over any drafter of ids.

The drafter is the model's own previous iterate (``speculative_jacobi``) or a draft model
(``speculative``); the verifier is one of ``relaxed``, which has the rules, their sources and what
is proved about them (LANTERN, arXiv 2410.03355; LANTERN++, 2502.06352; typical acceptance,
2401.10774; distance, 2507.22424; grouped, Cool-SD).

Guarantee: ``relaxation`` 0 is the exact sampler with that drafter, token for token. Above it
nothing is promised about the distribution of the whole; of a single step the verifier's ``bound``
holds, since drafts still come from the distribution they are judged by: what a Jacobi coupling does
with drafts beyond the first rejection stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value, unknown
from gen.core.registry import register, registry
from gen.core.sampler import Preset
from gen.samplers.causal.drafters.model import IdChain, ModelDrafted
from gen.samplers.causal.jacobi import JacobiDrafter, SpeculativeJacobi
from gen.samplers.engine.causal_loop import decode_causal
from gen.samplers.engine.window import AUTO, width_of

DRAFTERS = ("jacobi", "model")


@register("sampler", "relaxed_acceptance")
@dataclass(frozen=True)
class RelaxedAcceptance(ModelDrafted):
    """Accepts drafts that are near enough: faster than the exact samplers, and no longer quite the
    model's distribution.

    ``verifier``: lantern, lantern_pp, gsd, typical, cool or distance. ``relaxation``: how much, in
    the verifier's own terms; 0 is exact, None is the verifier's default. ``drafter``: jacobi or
    model. ``coupling`` (fresh, maximal or gumbel_shared), ``window``, ``init``: of the drafter
    jacobi. ``draft_model``, ``num_speculative_tokens``, ``policy``, ``confidence_threshold``,
    ``draft_temperature``, ``draft_guidance``: of the drafter model.
    """

    verifier: str = "lantern"
    relaxation: float | None = None
    drafter: str = "jacobi"
    coupling: str = "gumbel_shared"
    window: int | str = 64
    init: str = "uniform"

    papers = ("2410.03355", "2502.06352", "2401.10774", "2507.22424")
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not registry.get("verifier", self.verifier, "sampler.verifier").relaxed:
            known = ", ".join(name for name, v in registry.table("verifier").items() if v.relaxed)
            raise bad_value("sampler.verifier", self.verifier, f"a relaxed one: {known}")
        self._rule()
        if self.drafter not in DRAFTERS:
            raise unknown("sampler.drafter", self.drafter, DRAFTERS)
        SpeculativeJacobi(self.coupling, self.window, self.init)
        if self.coupling == "gumbel":
            raise bad_value(
                "sampler.coupling",
                self.coupling,
                "fresh, maximal or gumbel_shared; gumbel commits a draft only "
                "where it is the token itself, so there is no acceptance to relax",
            )

    def _rule(self):
        rule = registry.get("verifier", self.verifier)
        return rule() if self.relaxation is None else rule(self.relaxation)

    @property
    def guarantee(self) -> str:
        return self._rule().guarantee

    @property
    def drafted(self) -> bool:
        return self.drafter == "model"

    @property
    def timed(self) -> bool:
        return (self.num_speculative_tokens if self.drafted else self.window) == AUTO

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        verifier = self._rule().on(target.space, target.device)
        if self.drafter == "model":
            drafter = self.model_drafter(target, draft, IdChain(verifier, target.legal))
        else:
            coupling = registry.get("coupling", self.coupling)(verifier)
            init = registry.get("initialiser", self.init)
            drafter = JacobiDrafter(
                width_of(self.window, self, target), coupling, init, target.space, target.legal
            )
        return decode_causal(target, rng, drafter, trace=trace, callback=callback)


# a draft that is not random is judged by p alone; uniform ones have a q so small that relaxed rules
# would let any of them pass
for _name, _paper, _about in (
    ("lantern", "2410.03355", "LANTERN: the nearest codes count, up to a given mass"),
    (
        "lantern_pp",
        "2502.06352",
        "LANTERN++: the nearest codes count, up to a multiple of the draft's own mass",
    ),
    (
        "gsd",
        "ICCV 2025",
        "grouped speculative decoding: a cluster of similar codes is accepted as one",
    ),
    ("typical", "2401.10774", "typical acceptance: what the model itself holds for likely passes"),
    ("cool", "", "Cool-SD: acceptance raised by a factor that falls along the window"),
    ("distance", "2507.22424", "distance acceptance: bins near the draft count as it"),
):
    register("preset", _name)(
        Preset(
            _name,
            "relaxed_acceptance",
            {"verifier": _name, "init": "repeat"},
            about=_about,
            paper=_paper,
        )
    )
