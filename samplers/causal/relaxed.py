"""Relaxed acceptance: a verifier that accepts more drafts, over any drafter of token ids.

The drafter is a registered one: the model's own previous iterate (``jacobi``), a draft model
(``model``), or another file's. The verifier is one of ``gen.samplers.verifiers.relaxed``, which has
the rules, their sources and what is proved about them.

Guarantee: ``relaxation`` 0 is the exact sampler with that drafter, token for token. Above it
nothing is promised about the distribution of the whole; of a single step the verifier's ``bound``
holds, since drafts still come from the distribution they are judged by: what a Jacobi coupling does
with drafts beyond the first rejection stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value
from gen.core.registry import register, registry
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import ModelDrafted
from gen.samplers.causal.jacobi import SpeculativeJacobi
from gen.samplers.engine.window import width_of


@register("drafter", "jacobi")
class JacobiDrafts(DraftSource):
    """Drafts with the model's own previous iterate. Parameters: ``coupling``, ``window``,
    ``init``."""

    size_param = "window"
    reads = ("coupling", "window", "init")
    shapes = False

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        window = width_of(sampler.window, sampler, target)
        return sampler.jacobi().window_drafter(target, draft, verifier, window)


@register("sampler", "relaxed_acceptance")
@dataclass(frozen=True)
class RelaxedAcceptance(ModelDrafted):
    """Accept close drafts: fewer forward passes, approximate distribution.

    ``verifier``: a relaxed one, such as lantern, gsd or typical. ``relaxation``: how much, in the
    verifier's own terms; 0 is exact, None is the verifier's default. ``drafter``: jacobi, model or
    another registered one. The drafter jacobi reads ``coupling`` (fresh, maximal or gumbel_shared),
    ``window`` and ``init``; the drafter model reads ``draft_model``, ``num_speculative_tokens``,
    ``policy``, ``draft_temperature`` and ``draft_guidance``; exit reads them but for the model, and
    ``drafter_weights``, a folder. ``verifier_weights``: folder or name
    of the trained weights that the verifier judge reads; None is the model's own.
    """

    verifier: str = "lantern"
    relaxation: float | None = None
    drafter: str = "jacobi"
    coupling: str = "gumbel_shared"
    window: int | str = 64
    init: str = "uniform"
    drafter_weights: str | None = None
    verifier_weights: str | None = None

    papers = ("2410.03355", "2502.06352", "2401.10774", "2507.22424")
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not registry.get("verifier", self.verifier, "sampler.verifier").relaxed:
            known = ", ".join(name for name, v in registry.table("verifier").items() if v.relaxed)
            raise bad_value("sampler.verifier", self.verifier, f"a relaxed one: {known}")
        self._check_weights()
        source = registry.get("drafter", self.drafter, "sampler.drafter")
        if not source.makes_chains():
            known = registry.table("drafter").items()
            chains = " or ".join(name for name, one in known if one.makes_chains())
            expected = f"{chains}; the sampler speculative takes the others"
            raise bad_value("sampler.drafter", self.drafter, expected)
        source.check(self)
        self.jacobi()
        if self.coupling == "gumbel":
            raise bad_value(
                "sampler.coupling",
                self.coupling,
                "fresh, maximal or gumbel_shared; gumbel commits a draft only "
                "where it is the token itself, so there is no acceptance to relax",
            )

    def _check_weights(self) -> None:
        """Check what a verifier with trained weights reads. Raises ``GenError``."""
        rule, weights = self._rule(), self.verifier_weights
        if weights is not None and not (rule.needs_weights and isinstance(weights, str)):
            known = registry.table("verifier").items()
            trained = " or ".join(name for name, v in known if v.needs_weights)
            expected = f"None, or a folder with sampler.verifier {trained}"
            raise bad_value("sampler.verifier_weights", weights, expected)
        if rule.needs_weights and self.drafter == "jacobi":
            expected = f"a drafter of chains, such as model, with sampler.verifier {self.verifier}"
            raise bad_value("sampler.drafter", self.drafter, expected)

    def _rule(self):
        rule = registry.get("verifier", self.verifier)
        return rule() if self.relaxation is None else rule(self.relaxation)

    def _source(self) -> type[DraftSource]:
        return registry.get("drafter", self.drafter)

    @property
    def guarantee(self) -> str:
        return self._rule().guarantee

    def jacobi(self) -> SpeculativeJacobi:
        """Make the sampler that the drafter jacobi is of."""
        return SpeculativeJacobi(self.coupling, self.window, self.init, self.draft_model)

    @property
    def drafted(self) -> bool:
        needs = self._source().needs_draft_model
        return needs or (self.drafter == "jacobi" and self.jacobi().drafted)

    @property
    def timed(self) -> bool:
        return self._source().is_timed(self)

    def make_drafter(self, target, draft):
        verifier = self._rule().attach(target, self.verifier_weights)
        drafter = self._source().make(self, target, draft, verifier)
        if verifier.hidden_layers:
            drafter.needs = drafter.needs | {"hidden_states"}
            drafter.hidden_layers = (*drafter.hidden_layers, *verifier.hidden_layers)
        return drafter
