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
from typing import TYPE_CHECKING

from gen.core.params import Rule, param, part, require
from gen.core.registry import register, registry
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import DRAFTS_DECIDE, DraftsWithModel
from gen.samplers.engine.window import AUTO

if TYPE_CHECKING:
    from gen.samplers.causal.jacobi import SpeculativeJacobi
    from gen.samplers.verifiers.base import Token


@register("drafter", "jacobi")
class JacobiDrafts(DraftSource):
    """Drafts with the model's own previous iterate. Parameters: ``coupling``, ``window``,
    ``init``."""

    reads = ("coupling", "window", "init")
    shapes = False

    @classmethod
    def is_timed(cls, sampler):
        return sampler.window == AUTO

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        return sampler.jacobi().make_drafter(target, draft, verifier, owner=sampler)


@register("sampler", "relaxed_acceptance")
@dataclass(frozen=True)
class RelaxedAcceptance(DraftsWithModel):
    """Accept close drafts: fewer forward passes, approximate distribution.

    ``verifier``: a relaxed one, such as lantern, gsd or typical. ``relaxation``: how much, in the
    verifier's own terms; 0 is exact, None is the verifier's default. ``drafter``: jacobi, model or
    another registered one. The drafter jacobi reads ``coupling`` (fresh, maximal or gumbel_shared),
    ``window`` and ``init``; the drafter model reads ``draft_model``, ``num_speculative_tokens``,
    ``policy``, ``draft_temperature`` and ``draft_guidance``; exit reads them but for the model, and
    ``drafter_weights``, a folder. ``verifier_weights``: folder or name
    of the trained weights that the verifier judge reads; None is the model's own.
    ``confidence_threshold``: of the policy confidence.
    """

    verifier: str = part("lantern", "verifier")
    relaxation: float | None = None
    drafter: str = part("jacobi", "drafter")
    coupling: str = part("gumbel_shared", "coupling")
    window: int | str = param(64, int, 1, also=(AUTO,))
    init: str = part("uniform", "initialiser")
    drafter_weights: str | None = None
    verifier_weights: str | None = param(
        None, str, also=(None,), expected="None, or a folder or name of trained weights"
    )
    confidence_threshold: float = 0.4

    papers = ("2410.03355", "2502.06352", "2401.10774", "2507.22424")
    reference = "plain autoregression"
    rules = (
        *DraftsWithModel.rules,
        DRAFTS_DECIDE,
        Rule("verifier", lambda s: s.parts.verifier.relaxed, "a relaxed one: {verifier?,}"),
        Rule(
            "verifier_weights",
            lambda s: s.verifier_weights is None or s.parts.verifier.needs_weights,
            "None, or a folder with sampler.verifier {verifier?}",
        ),
        Rule(
            "drafter",
            lambda s: s.drafter != "jacobi" or not s.parts.verifier.needs_weights,
            "a drafter of chains, such as model, with sampler.verifier {verifier}",
        ),
        Rule(
            "drafter",
            lambda s: s.parts.drafter.makes_chains(),
            "{drafter?}; the sampler speculative takes the others",
        ),
        Rule(
            "coupling",
            lambda s: s.coupling != "gumbel",
            "{coupling?}; gumbel commits a draft only where it is the token itself, so there is no"
            " acceptance to relax",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rule()  # which checks how much it relaxes
        require(self, self.parts.drafter.rules)

    def _rule(self) -> Token:
        rule = self.parts.verifier
        return rule() if self.relaxation is None else rule(self.relaxation)

    @property
    def guarantee(self) -> str:
        return self._rule().guarantee

    def jacobi(self) -> SpeculativeJacobi:
        """Make the sampler that the drafter jacobi is of."""
        shared = ("coupling", "window", "init", "draft_model")
        cls = registry.get("sampler", "speculative_jacobi")
        return cls(**{name: vars(self)[name] for name in shared})

    @property
    def drafted(self) -> bool:
        needs = self.parts.drafter.needs_draft_model
        return needs or (self.drafter == "jacobi" and self.jacobi().drafted)

    @property
    def timed(self) -> bool:
        return self.parts.drafter.is_timed(self)

    def make_drafter(self, target, draft):
        verifier = self._rule().attach(target, self.verifier_weights)
        drafter = self.parts.drafter.make(self, target, draft, verifier)
        if verifier.hidden_layers:
            drafter.needs = drafter.needs | {"hidden_states"}
            drafter.hidden_layers = (*drafter.hidden_layers, *verifier.hidden_layers)
        return drafter
