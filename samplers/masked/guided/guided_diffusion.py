"""Guided diffusion: a masked model proposes everything, a causal one says how much of it to
believe.

    propose   x_i ~ p(. | canvas) at every empty place i: one call of the masked model
    judge     q_i = q(. | x_<i) at all of them, x with the proposals in it: one call of the causal
              model
    agree     the empty places before the first one at which q_i refuses x_i are committed; where
              that is none, the one whose proposal the masked model is surest of

q_i refuses x_i that is not among its ``judge_top_k`` likeliest ids (``agree`` = ``top_k``), or also
(``relative``) if q_i(x_i) is below ``judge_ratio`` times the highest. With ``commit_correction``
the place that was refused gets the judge's likeliest id. q is the judge's own law: guided if the
law is, without temperature and filters. Nothing that is given is judged.

FlashDLM (Hu et al., arXiv 2505.21467). Their paper lets the judge say no and nothing else; their
code writes its id, as ``commit_correction`` does. What happens where the judge refuses everything
is said by neither, and is ours. Their cache is another part (``cache_policies``).

Guarantee: none about either law. With ``commit_correction`` and ``judge_top_k`` = 1 the tokens are
the judge's own at temperature 0, whatever the masked model proposes, where the canvas gives none
behind an empty place; and there are as many calls as the masked model needs to say so, at most one
per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.registry import register, registry
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.models.targets.causal import CausalTarget
from gen.samplers.masked.iterative import MaskedIterative
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.step import MaskedStep


@register("sampler", "guided_diffusion")
@dataclass(frozen=True)
class GuidedDiffusion(Sampler):
    """A masked model proposes, a causal one accepts the beginning of what is proposed.

    ``draft_model``: the judge, a causal model's name; None for the modality's own. ``agree``: top_k
    or relative, with ``judge_top_k`` ids and the ratio ``judge_ratio``. ``commit_correction``:
    whether the judge's id takes the place of the first that it refuses. ``stop``: as in
    ``masked_iterative``, filled or end.
    """

    draft_model: str | None = None
    agree: str = "top_k"
    judge_top_k: int = 5
    judge_ratio: float = 0.1
    commit_correction: bool = False
    stop: str = "filled"

    papers = ("2505.21467",)
    protocol = "masked"
    draft_protocol = "causal"
    reference = "the judge at temperature 0"
    guarantee = "approximate"

    def __post_init__(self) -> None:
        k, ratio = self.judge_top_k, self.judge_ratio
        if self.draft_model is not None and not isinstance(self.draft_model, str):
            raise bad_value(
                "sampler.draft_model",
                self.draft_model,
                "the name of a causal model, or None for the modality's own",
            )
        if self.agree not in ("top_k", "relative"):
            raise bad_value("sampler.agree", self.agree, "top_k or relative")
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise bad_value("sampler.judge_top_k", k, "an integer of at least 1")
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
            raise bad_value("sampler.judge_ratio", ratio, "a number between 0 and 1")
        if not isinstance(self.commit_correction, bool):
            raise bad_value("sampler.commit_correction", self.commit_correction, "true or false")
        if self.stop not in ("filled", "end"):  # others count steps
            raise bad_value("sampler.stop", self.stop, "filled or end")

    @property
    def drafted(self) -> bool:
        return True

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        """``draft``: a target of the judge for the same items and the same places. Raises
        ``GenError`` for one that is missing or speaks of other ids."""
        if target.space.mask_token_id is None:
            raise GenError(
                "guided_diffusion needs a token space with a mask id; this model has none"
            )
        judge = _Judge(self, target, draft)
        params = MaskedIterative(order="confidence", choice_temperature=0.0, stop=self.stop)
        parts = {"proposer": judge.propose, "selector": lambda step: step.memory["agreed"]}
        out = decode_masked(
            target, rng, params, canvas=canvas, trace=trace, callback=callback, instead=parts
        )
        return replace(
            out, stats=[replace(s, draft_nfe=n) for s, n in zip(out.stats, judge.nfe, strict=True)]
        )


class _Judge:
    """The causal model, against a cache of what it was told last."""

    def __init__(self, rule: GuidedDiffusion, target, draft: CausalTarget | None):
        if draft is None:
            raise GenError(
                "this sampler judges with a causal model and got none; name one in"
                " sampler.draft_model"
            )
        ours, theirs = target.space, draft.space
        if ours.vocab_size != theirs.vocab_size or ours.length != theirs.length:
            raise GenError(
                f"the judge has {theirs.vocab_size} ids and {theirs.length} places; expected the"
                f" masked model's {ours.vocab_size} and {ours.length}"
            )
        if not torch.equal(target.legal, draft.legal.to(target.device)):
            raise GenError(
                "the judge's legal ids are not the masked model's; expected a model of the same"
                " tokens"
            )
        self.rule, self.target = (
            rule,
            draft.with_params(SamplingParams(guidance_scale=draft.sampling.guidance_scale)),
        )
        self.rows = torch.arange(draft.rows, device=draft.device)
        # the ids that it was given in the last call, [b, T]; -1 in rows that are others since
        self.told: Tensor | None = None
        self.nfe = [0] * draft.items
        self.believes: Callable = registry.get("proposer", "categorical")

    def propose(self, step: MaskedStep) -> Tensor:
        """An id for every empty place [b, T]; remembers which of them are agreed on."""
        self._follow(step.rows)
        ids = torch.where(step.masked, self.believes(step), step.canvas)
        position, total = step.positions, ids.shape[1]
        start = self._start(ids, step.masked)
        column = torch.arange(total - int(start.min()), device=ids.device)
        at = start[:, None] + column
        at = torch.where(
            at < total, at, start[:, None]
        )  # a column that does not exist repeats the row's first
        law, _ = self.target.predict(ids.gather(1, (at - 1).clamp_min(0)), at)
        for row in step.rows.tolist():
            self.nfe[row] += 1
        fine, best = self._verdict(law, ids.gather(1, at))
        back = (position - start[:, None]).clamp(0, len(column) - 1)
        refused = step.masked & ~fine.gather(1, back)
        first = torch.where(refused, position, total).amin(1, keepdim=True)
        agreed = step.masked & (position < first)
        if self.rule.commit_correction:
            agreed |= position == first
            ids = torch.where(position == first, best.gather(1, back), ids)
        step.memory["agreed"] = agreed
        return ids

    def _start(self, ids: Tensor, masked: Tensor) -> Tensor:
        """The first place [b] whose law is wanted, or whose neighbour on the left is not what the
        cache holds."""
        told, self.told = self.told, ids
        if told is None:  # nothing was: what stands before place 0 comes with it
            return torch.zeros_like(self.rows)
        position, total = torch.arange(ids.shape[1], device=ids.device), ids.shape[1]
        stale = torch.where(told != ids, position + 1, total).amin(1)
        return torch.minimum(masked.long().argmax(1), stale).masked_fill(told[:, 0] < 0, 0)

    def _verdict(self, law: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the judge takes ids [b, W] under its law [b, W, V], and its own choice."""
        own = law.gather(-1, ids[..., None])
        number = torch.arange(law.shape[-1], device=law.device)
        before = (law > own) | ((law == own) & (number < ids[..., None]))
        fine = (before.sum(-1) < self.rule.judge_top_k) & own[..., 0].isfinite()
        top, best = law.max(-1)
        if self.rule.agree == "relative" and self.rule.judge_ratio > 0:
            fine &= own[..., 0] >= top + log(self.rule.judge_ratio)
        return fine, best

    def _follow(self, rows: Tensor) -> None:
        """Its rows become those [b] of the masked model: the first of the ones that are done are
        the next items, the others leave the batch."""
        done, new = ~torch.isin(self.rows, rows), rows[~torch.isin(rows, self.rows)]
        if len(new):
            free, again = done.nonzero()[: len(new), 0], torch.zeros_like(done)
            again[free] = True
            self.target.replace(again, new)
            self.rows = self.rows.index_copy(0, free, new)
            self.told = None if self.told is None else self.told.masked_fill(again[:, None], -1)
            done = done & ~again
        if len(rows) < len(self.rows):
            self.target.keep(~done)
            self.rows, self.told = self.rows[~done], None if self.told is None else self.told[~done]
