"""Targets of models of latents: a forward pass gives conditioning vectors, and ``paths`` is the
distribution of a latent given one.

The distribution's guidance acts inside the path distribution, so a conditioning vector is a pair of
them where the distribution is guided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gen.models.adapters.denoising_path import HeadDistribution, PathDistribution
from gen.models.targets.base import StepOutput, Target
from gen.models.targets.canvas_rule import AnyOrderTarget
from gen.models.targets.causal import CausalTarget


class LatentTarget(Target):
    """Common part of the targets of latents. ``model``: an adapter of
    ``gen.models.adapters.language_models`` with a ``head``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.paths: PathDistribution = HeadDistribution(self.model.head, self.sampling)

    def blank(self) -> Tensor:
        return self.space.blank(self.items, self.device, self.model.dtype)

    def _pair(self, out: Tensor) -> Tensor:
        """Pair the branches of CFG: [H B, L, D] -> [B, L, H, D]."""
        return torch.stack(out.chunk(self.branches), 2)


class CausalLatentTarget(LatentTarget, CausalTarget):
    """``predict(latents [B, L, C], positions [B, L])`` -> conditioning vectors [B, L, H, D],
    positions computed."""

    @property
    def first(self) -> Tensor:
        return self.model.embed_words(self.prompt)

    def _inputs(self, tokens: Tensor) -> Tensor:
        return self.model.embed_latents(tokens)

    def _outcome(self, out: Tensor, positions: Tensor) -> tuple[Tensor, None]:
        return self._pair(out), None


class MaskedLatentTarget(LatentTarget, AnyOrderTarget):
    """Masked model of latents: a forward pass of a canvas [B, T, C], NaN at masked positions, gives
    conditioning vectors [B, T, H, D]."""

    num_known: Tensor | None = None  # positions known after the next step, long [B]

    @property
    def replaces(self) -> bool:
        return self.prompts.has_one_length

    @property
    def opens(self) -> bool:
        """True if items can be given prompts later (``Target.put``)."""
        return self.replaces

    def takes(self, other: Target) -> bool:
        """See ``Target.takes``; prompts have one length."""
        return bool((other.prompts.host_lengths == self.prompts.host_lengths[0]).all())

    def prepare(self, step: Any) -> None:
        """Note how many positions the schedule makes known, for guidance that grows with them."""
        if self.model.counts_known and step.block is not None:
            self.num_known = (~step.masked).sum(1) + step.block.quota

    def predict(self, canvas: Tensor) -> StepOutput:
        """Run the network on a canvas [B, T, C]."""
        self._require_one_length()
        more = {}
        if self.num_known is not None:
            more["num_known"] = self.num_known.repeat(self.branches)
        out = self.model.forward(self.prompt, canvas.repeat(self.branches, 1, 1), **more)
        self.num_known = None
        num_computed = (self.prompt.shape[1] + canvas.shape[1]) * self.branches
        return StepOutput(self._pair(out), num_computed, num_computed)

    def _require_one_length(self) -> None:
        if int(self.prompt_length.min()) != self.prompt.shape[1]:
            raise ValueError("masked models need conditions of one length")
