"""Masked iterative decoding: predict all masked places, commit some, repeat.

    step s of S, r = (s + 1) / S, N masked places at the start:
    propose   x_i ~ p_i for every masked place i
    select    the places that stay masked are the floor(N schedule(r)) with the lowest score (at
              least one fewer than before; none after the last step)
    recheck   a remasker may empty places that an earlier step committed, fewer than are committed
              now, and none in the last step; those of the given canvas are never touched

That is the selector ``schedule`` (``selectors``); others commit as many places as they dare, block
by block if ``blocks`` says so. The loop and its parts are in ``masked_loop``, what the parts may
look at in ``masked_step``, all knobs in ``masked_knobs``.

Scores are an ``order``. ``confidence`` is MaskGIT (Chang et al., arXiv 2202.04200): log p(x_i) + t
(1 - r) Gumbel, with t = ``choice_temperature``. ``halton`` is Besnier et al. (arXiv 2503.17076).
The start may be any partly filled canvas: what it holds is kept, which is inpainting. Remaskers and
their rules are in ``remaskers``; by default there is none.

Latents (MAR, arXiv 2406.11838) are decoded by the same steps: a place that is committed gets the
end of its denoising path. Nothing ranks latents before they are drawn, so the order must not look
at them; the default is one random permutation per item.

Guarantee: places committed in the same step are drawn independently of each other, so the law is
not the model's (exactness ``none``). With one place per step (schedule ``linear``, as many steps as
places), no remasker and an order that does not look at the tokens, it is the law of sequential
decoding in that order. Every step leaves fewer masked places than there were, and all are filled
after at most S calls, whatever the remasker, where the selector is ``schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.sampler import Preset, Sampler
from gen.samplers.masked.config import MaskedParams
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import MaskedStep, highest


@register("sampler", "masked_iterative")
@dataclass(frozen=True)
class MaskedIterative(MaskedParams, Sampler):
    """All masked places at once, some of them kept, again and again. The knobs are those of
    ``gen.samplers.masked.config.MaskedKnobs``."""

    protocol = "masked"
    kinds = ("codes", "latents")
    reference = "one place per step in the same order"
    guarantee = "approximate"

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        space = target.space
        if space.channels:
            self._refuse_latents()
        elif space.mask_token_id is None:
            raise GenError(
                "masked_iterative needs a token space with a mask id; this model has none"
            )
        return decode_masked(target, rng, self, canvas=canvas, trace=trace, callback=callback)

    def _refuse_latents(self) -> None:
        """Nothing ranks latents before they are drawn, and nothing judges them afterwards."""
        usual = MaskedParams()
        if self.order is not None and self.order not in BLIND:
            raise GenError(
                f"sampler.order is {self.order!r}, which looks at the probability of an id; latents"
                f" have none; expected {', '.join(BLIND)}"
            )
        for name in ("remasker", "selector", "stop", "blocks"):
            if getattr(self, name) not in (
                getattr(usual, name),
                *(["fixed"] if name == "blocks" else []),
            ):
                raise GenError(
                    f"sampler.{name} is {getattr(self, name)!r}, which looks at the probability of"
                    f" ids; latents have none; expected {getattr(usual, name)}"
                )


@register("proposer", "categorical")
def categorical(step: MaskedStep) -> Tensor:
    """An id from the law at every masked place, with noise of the place and the step: [b, T]."""
    return step.rng.categorical(
        step.logprobs, step.rows, step.positions, "propose", step.step_index, step.masked
    )


@register("proposer", "argmax")
def argmax(step: MaskedStep) -> Tensor:
    """The most likely id."""
    return step.logprobs.argmax(-1)


@register("selector", "schedule")
def schedule(step: MaskedStep) -> Tensor:
    """As many as the schedule says, the highest scores first."""
    return highest(step.score, step.eligible, step.quota)


@register("stop", "filled")
def filled(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """When nothing is empty any more."""
    return torch.zeros_like(step.rows, dtype=torch.bool), canvas


@register("block_schedule", "whole")
def whole(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """All places are one block."""
    return torch.ones_like(step.masked), torch.zeros_like(step.rows)


def numbered(step: MaskedStep) -> Tensor:
    """The number [b, T] of the block of ``block_length`` places that each one is in. With
    ``align_blocks`` they are counted from the first id of the condition, so that the canvas may
    begin inside of one."""
    before = step.num_prompt_tokens[:, None] if step.params.align_blocks else 0
    return (step.positions + before) // step.params.block_length


@register("block_schedule", "fixed")
def fixed(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Blocks of ``block_length`` places, one after the other: the first that has an empty place."""
    block = numbered(step)
    number = block.gather(1, step.masked.long().argmax(1)[:, None])
    return block == number, number[:, 0]


for _preset in (
    Preset(
        "maskgit",
        "masked_iterative",
        {"steps": 12, "order": "confidence", "schedule": "cosine"},
        about="MaskGIT: confidence order, cosine schedule",
        paper="2202.04200",
    ),
    Preset(
        "halton",
        "masked_iterative",
        {"steps": 12, "order": "halton", "schedule": "arccos"},
        about="Halton scheduler: low-discrepancy order",
        paper="2503.17076",
    ),
    Preset(
        "maskgit_remask",
        "masked_iterative",
        {"steps": 12, "order": "confidence", "schedule": "cosine", "remasker": "low_confidence"},
        about="MaskGIT that may take back what has become unlikely",
    ),
    Preset(
        "ddvla",
        "masked_iterative",
        {"steps": 12, "order": "confidence", "schedule": "cosine", "remasker": "secondary"},
        about="Discrete Diffusion VLA: confidence order, secondary re-masking",
        paper="2508.20072",
    ),
    Preset(
        "mar",
        "masked_iterative",
        {"steps": 64, "order": "random", "schedule": "cosine"},
        about="MAR: latents in random order, cosine schedule",
        paper="2406.11838",
    ),
):
    register("preset", _preset.name)(_preset)
