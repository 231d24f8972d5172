"""Plain autoregression: one token per forward call, drawn from the law. The reference that causal methods are held to.

    x_n = argmax log p(. | x_<n) + G_n        G_n: the noise of position n
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.registry import register
from gen.samplers.loop import decode_causal
from gen.sampling import Sampler


class _NoDrafts:
    window = 1

    def propose(self, now, tokens):
        return tokens[:, :0], tokens[:, :0].bool()

    def verify(self, now, logp):
        ids = now.categorical(logp, "token", now.valid, shared=True)
        return ids.new_zeros(len(ids)), ids

    def keep(self, rows):
        pass


@register("sampler", "autoregressive")
@dataclass(frozen=True)
class Autoregressive(Sampler):
    """One token per forward call; the reference for causal models."""

    protocol = "causal"
    reference = "plain autoregression"
    exactness = "sample"

    def __call__(self, target, draws, *, draft=None, canvas=None, trace=False, callback=None):
        return decode_causal(target, draws, _NoDrafts(), trace=trace, callback=callback)
