"""Plain autoregression: one token per forward pass, drawn from the model's distribution. The
reference of causal methods.

ids       x_n = argmax log p(. | x_<n) + G_n        G_n: the noise of position n
latents   x_n = the end of the path that the noise of position n leads along, given z_n = z(x_<n)
          (arXiv 2406.11838)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.registry import register
from gen.models.adapters.denoising_path import PathDistribution, noise_size, walk
from gen.samplers.engine.causal_loop import CausalSampler, Drafter
from gen.samplers.engine.draft import Draft, Verdict


class _NoDrafts(Drafter):
    """Drafter that drafts nothing: every step draws one token."""

    window, captures = 1, True

    def __init__(self):
        self.rows: Tensor | None = None

    def propose(self, step, tokens):
        if step.rows is not self.rows:  # the same nothing as long as the rows stay
            self.rows = step.rows
            self.nothing = Draft.none(tokens, step.valid)
            self.none_accepted = torch.zeros_like(step.start)
        return self.nothing

    def verify(self, step, draft, output):
        ids = step.categorical(output.logprobs, "token", step.valid, shared=True)
        return Verdict(self.none_accepted, ids)


class _NoLatentDrafts(_NoDrafts):
    """Drafter that drafts nothing, for latents: the noise leads along a denoising path."""

    def __init__(self, paths: PathDistribution):
        super().__init__()
        self.paths = paths

    def verify(self, step, draft, output):
        noise = step.normal("token", noise_size(self.paths), 1, shared=True)
        latents = walk(self.paths, output.logprobs, noise)[..., -1, :]
        return Verdict(self.none_accepted, latents)


@register("sampler", "autoregressive")
@dataclass(frozen=True)
class Autoregressive(CausalSampler):
    """Draw one token per forward pass; the reference of causal models."""

    papers = ("2406.11838",)
    kinds = ("codes", "latents")
    reference = "plain autoregression"
    guarantee = "same_tokens"

    @property
    def mixes_sampling(self) -> bool:
        """True: tokens are drawn from the target's distribution."""
        return True

    def make_drafter(self, target, draft):
        return _NoLatentDrafts(target.paths) if target.space.channels else _NoDrafts()
