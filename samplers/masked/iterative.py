"""Masked iterative decoding: predict all masked positions, commit some, repeat.

    step s of S, r = (s + 1) / S, N masked positions at the start:
    propose   x_i ~ p_i for every masked position i
    select    the positions that stay masked are the floor(N schedule(r)) with the lowest score (at
              least one fewer than before; none after the last step; schedule ``arccos`` rounds up)
    revise    a remasker may mask positions that an earlier step committed, fewer than are committed
              now, and none in the last step; those of the given canvas are never touched

That is the selector ``schedule``; other selectors commit as many positions as they find confident,
block by block if ``blocks`` says so. The loop is in ``gen.samplers.masked.loop``, the generic parts
in ``parts``, and the rules of published methods in ``methods``, one paper per file.

The start may be any partly filled canvas: the tokens that it holds are kept, which is inpainting.

Latents (MAR, arXiv 2406.11838) are decoded by the same steps: a position that is committed gets the
end of its denoising path. Nothing ranks latents before they are drawn, so the order must not look
at them; the default is one random permutation per item.

Guarantee: approximate. Positions committed in the same step are drawn independently of each other.
With one position per step (schedule ``linear``, as many steps as positions), no remasker and an
order that does not look at the tokens, the distribution is that of sequential decoding in that
order. Every step leaves fewer masked positions than there were, and all are filled after at most S
forward passes, whatever the remasker, where the selector is ``schedule``.
"""

from __future__ import annotations

from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.stepped import SteppedMasked


@register("sampler", "masked_iterative")
class MaskedIterative(MaskedSampler):
    """Predict all masked positions, commit some of them, and repeat. The parameters are
    those of ``gen.samplers.masked.config.MaskedSampler`` and of all parts."""

    kinds = ("codes", "latents")
    papers = ("2202.04200", "2503.17076", "2406.11838")
    reference = "one position per step in the same order"
    guarantee = "approximate"

    @property
    def counts_steps(self) -> bool:
        """True where the selector follows the schedule of ``steps``."""
        return self.selector == "schedule"

    @property
    def opens(self) -> bool:
        """True without a cache, whose columns belong to the items of the start."""
        return self.cache == "none"

    @property
    def mixes_sampling(self) -> bool:
        """True: parts read log-probabilities alone."""
        return True

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        self._check(target.space)
        return decode_masked(target, rng, self, canvas=canvas, trace=trace, callback=callback)

    def begin(self, target, rng, *, draft=None, canvas=None, trace=False):
        self._check(target.space)
        return SteppedMasked(target, rng, self, canvas, trace)

    def _check(self, space: TokenSpace) -> None:
        """Raise ``GenError`` for a token space that the parameters do not fit."""
        if space.channels:
            self._refuse_latents()
        elif space.mask_token_id is None:
            raise GenError(
                "masked_iterative needs a token space with a mask token; this model has none"
            )

    def _refuse_latents(self) -> None:
        """Raise ``GenError`` for parts that read probabilities of tokens."""
        if self.order is not None and self.order not in BLIND:
            raise GenError(
                f"sampler.order is {self.order!r}, which looks at the probability of a token;"
                f" latents have none; expected {', '.join(BLIND)}"
            )
        for name in ("remasker", "selector", "stop", "blocks"):
            if getattr(self, name) not in (
                self.own[name].default,
                *(["fixed"] if name == "blocks" else []),
            ):
                raise GenError(
                    f"sampler.{name} is {getattr(self, name)!r}, which looks at the probability of"
                    f" tokens; latents have none; expected {self.own[name].default}"
                )
