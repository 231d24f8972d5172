"""Speculative decoding of latents: a small model drafts a chain of latents, the target judges them
in one forward pass.

The draft model walks a denoising path per position; the target computes the conditioning vectors of
all positions at once, compares the paths, keeps the beginning of the chain and adds one latent: it
replaces the first rejected draft, or follows the last one with the target's own distribution.
Drafts behind a rejection were conditioned on what was rejected, and are dropped. See
``path_verifiers`` for the rules and ``drafting`` for the chains.

    exact      the ratio and the residual of whole paths
    relaxed    draft and target share the noise of every position, only the last transitions are
               compared, and their exponents are flattened by 1 - relaxation, their scales not. The
               first ``prefill_ratio`` of the positions is the target's alone

Wang et al., "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv
2411.11925), who put the relaxed rule in place of the ratio of whole paths, since that is small
wherever target and draft differ much.

Guarantee. ``exact``: latents have the distribution of the target alone, whatever the draft model,
the length of the chains and the batch, up to 1 / (e (max_tries + 1)) in total variation per token
(0.00037 for 1000), and mostly far less; the proof stands in ``path_verifiers``. ``relaxed``: none,
and no bound. ``relaxation`` 0 is the paper's rule as it is written, which has the target's
distribution only if paths have one step; 1 judges drafts by the scales of the transitions alone.
Equal models give what the target alone gives with that seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gen.core.errors import GenError, unknown
from gen.core.method import presets
from gen.core.params import Rule, integer, number, param
from gen.core.registry import register
from gen.samplers.causal.drafters.model import DRAFTS_DECIDE, DraftsWithModel, ModelDrafter
from gen.samplers.causal.length_policies.base import LengthPolicy
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.window import AUTO
from gen.samplers.latent.path_verifiers import AlignedPaths, ExactPaths, PathRule
from gen.samplers.verifiers.base import TOKEN

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget

MODES = ("exact", "relaxed")


class _AfterPrefill(LengthPolicy):
    """Length policy without drafts for the first ``positions`` steps of a row, in which it gets one
    token each; then what another policy says."""

    left = RowState(start=lambda policy: policy.positions)  # steps without drafts, int64 [b]

    def __init__(self, policy: LengthPolicy, positions: int):
        self.policy, self.positions = policy, positions
        self.stops_early = policy.stops_early
        self.left = np.full_like(policy.lengths, positions)

    @property
    def stores(self):
        return (self.store, *self.policy.stores)

    @property
    def lengths(self):
        return np.where(self.left > 0, 0, self.policy.lengths)

    def begin(self):
        self.policy.begin()

    def stop(self, mass, logprobs):
        return self.policy.stop(mass, logprobs)

    def observe(self, drafted, accepted):
        before = self.policy.lengths
        self.policy.observe(drafted, accepted)
        self.policy.lengths = np.where(self.left > 0, before, self.policy.lengths)
        self.left = self.left - 1

    def over(self, width, starts, tokens):
        self.policy.over(width, starts, tokens)


class _PathDrafter(ModelDrafter):
    """Drafter of chains of latents, each the end of a path.

    Args:
        draft: fresh target of the draft model.
        paths: rule that draws drafts and decides which are accepted.
        policy: decides how long the chains are.
    """

    def __init__(self, draft: CausalTarget, paths: PathRule, policy: LengthPolicy):
        super().__init__(draft, TOKEN, policy)
        self.paths = paths

    def propose(self, step, tokens):
        self.paths.begin()
        return super().propose(step, tokens)

    def draw(self, step, column, logprobs, active):
        return self.paths.draw(step, column, logprobs, active)

    def verify(self, step, draft, output):
        if not draft.tokens.shape[1]:
            latents = self.paths.undrafted(step, output.logprobs)
            return Verdict(torch.zeros_like(step.start), latents)
        return self.paths.verify(step, draft, output.logprobs)


@register("sampler", "continuous_speculative")
@dataclass(frozen=True)
class ContinuousSpeculative(DraftsWithModel):
    """Draft latents with a small model and verify several drafts per forward pass.

    ``mode``: exact or relaxed. ``max_tries``: draws from the target's side to replace a rejected
    draft; the error of the exact mode decreases with it. ``relaxation``: of the relaxed mode, from
    0 (the paper's rule) to 1 (accepts everything). ``prefill_ratio``: share of positions that the
    relaxed mode does not draft. ``draft_model``: a model's name; None for the modality's own.
    ``num_speculative_tokens``: drafts per round. ``policy``: a length policy that reads no
    probability. ``draft_temperature``, ``draft_guidance``: sampling parameters of the draft model;
    None takes those of the target. ``confidence_threshold``: of the policy confidence.
    """

    num_speculative_tokens: int | str = param(4, int, 1, also=(AUTO,), each="column")
    mode: str = "exact"
    max_tries: int = integer(1000, least=1)
    relaxation: float = number(0.0, most=1)
    prefill_ratio: float = number(0.05, most=1)
    confidence_threshold: float = 0.4

    kinds = ("latents",)
    papers = ("2411.11925",)
    reference = "target-only sampling"
    rules = (
        *DraftsWithModel.rules,
        DRAFTS_DECIDE,
        Rule(
            "policy",
            lambda s: not (s.parts.policy.needs_probability or s.parts.policy.needs_same_tokens),
            "{policy?}: a latent has no probability",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise unknown("sampler.mode", self.mode, MODES)

    @property
    def guarantee(self) -> str:
        return "same_distribution" if self.mode == "exact" else "approximate"

    @property
    def drafted(self) -> bool:
        return True

    def make_drafter(self, target, draft):
        draft = self.draft_target(target, draft)
        ours, theirs = target.paths, draft.paths
        if ours.steps != theirs.steps:
            raise GenError(
                f"the draft model's paths have {theirs.steps} steps; expected the target's"
                f" {ours.steps}"
            )
        lengths = self.length_policy(target, draft.rows)
        if self.mode == "exact":
            paths = ExactPaths(ours, theirs, self.max_tries)
        else:
            paths = AlignedPaths(ours, theirs, self.max_tries, self.relaxation)
            lengths = _AfterPrefill(lengths, math.ceil(self.prefill_ratio * target.length))
        return _PathDrafter(draft, paths, lengths)


presets(
    "continuous_speculative",
    ContinuousSpeculative,
    cspd={
        "mode": "relaxed",
        "num_speculative_tokens": 8,
        "relaxation": 0.9994,
        "paper": "2411.11925",
        "about": "continuous speculative decoding with shared noise and an acceptance ratio"
        " flattened by 42^2, as in the released code",
    },
)
