"""Plain autoregression: one token per forward call, drawn from the law. The reference that causal
methods are held to.

ids       x_n = argmax log p(. | x_<n) + G_n        G_n: the noise of position n
latents   x_n = the end of the path that the noise of position n leads along, given z_n = z(x_<n)
          (arXiv 2406.11838)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.registry import register
from gen.core.sampler import Sampler
from gen.models.adapters.denoising_path import noise_size, walk
from gen.samplers.engine.causal_loop import Drafter, decode_causal


class _NoDrafts(Drafter):
    window = 1

    def __init__(self):
        self.rows = None

    def propose(self, step, tokens):
        if step.rows is not self.rows:  # nothing, of so many rows
            self.rows, self.nothing = (
                step.rows,
                (
                    tokens[:, :0],
                    step.valid[:, :0],
                    torch.zeros_like(step.start),
                ),
            )
        return self.nothing[:2]

    def verify(self, step, law):
        return self.nothing[2], step.categorical(law, "token", step.valid, shared=True)

    def renew(self, rows):
        pass


class _NoLatentDrafts(_NoDrafts):
    def __init__(self, paths):
        super().__init__()
        self.paths = paths

    def verify(self, step, law):
        noise = step.normal("token", noise_size(self.paths), 1, shared=True)
        return self.nothing[2], walk(self.paths, law, noise)[..., -1, :]


@register("sampler", "autoregressive")
@dataclass(frozen=True)
class Autoregressive(Sampler):
    """One token per forward call; the reference for causal models."""

    papers = ("2406.11838",)
    protocol = "causal"
    kinds = ("codes", "latents")
    reference = "plain autoregression"
    guarantee = "same_tokens"

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        drafter = _NoLatentDrafts(target.paths) if target.space.channels else _NoDrafts()
        return decode_causal(target, rng, drafter, trace=trace, callback=callback)
