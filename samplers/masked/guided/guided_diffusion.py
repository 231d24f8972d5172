"""Guided diffusion: a masked model proposes all tokens, a causal one judges how many to accept.

    propose   x_i ~ p(. | canvas) at every masked position i: one forward pass of the masked model
    judge     q_i = q(. | x_<i) at all of them, x with the proposals in it: one forward pass of the
              causal model
    accept    the masked positions before the first one at which q_i rejects x_i are committed;
              where that is none, the one whose proposal has the highest confidence

q_i rejects x_i that is not among its ``judge_top_k`` likeliest tokens (``agree`` = ``top_k``), or
also (``relative``) if q_i(x_i) is below ``judge_ratio`` times the highest. With
``commit_correction`` the rejected position gets the judge's likeliest token. q is the judge's own
distribution: with classifier-free guidance if its sampling parameters have it, without temperature
and filters. Prefilled positions are not judged.

FlashDLM (Hu et al., arXiv 2505.21467). In their paper the judge only rejects; their code writes its
token, as ``commit_correction`` does. Neither says what happens where the judge rejects everything;
that rule is ours. Their cache is another part (``gen.samplers.masked.parts.caches``).

Guarantee: none about either distribution. With ``commit_correction`` and ``judge_top_k`` = 1 the
tokens are the judge's own at temperature 0, whatever the masked model proposes, where the canvas is
prefilled nowhere behind a masked position; the number of forward passes depends on the masked
model, at most one per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError
from gen.core.params import choice, flag, integer, number, param
from gen.core.registry import register, registry
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.failed import first_failed, refuse_failed
from gen.samplers.masked.iterative import MaskedIterative
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.step import MaskedStep


@register("sampler", "guided_diffusion")
@dataclass(frozen=True)
class GuidedDiffusion(Sampler):
    """Propose tokens with a masked model and commit those that a causal model accepts.

    Attributes:
        draft_model: the judge, a causal model's name; None for the modality's own.
        agree: rule of the judge, ``top_k`` or ``relative``.
        judge_top_k: tokens that the judge accepts at a position.
        judge_ratio: least probability, as a share of the highest, where ``agree`` is ``relative``.
        commit_correction: whether the judge's token is committed at the first rejected position.
        stop: as in ``masked_iterative``, ``filled`` or ``end``.
    """

    draft_model: str | None = param(
        None,
        str,
        also=(None,),
        expected="the name of a causal model, or None for the modality's own",
    )
    agree: str = choice("top_k", ("top_k", "relative"))
    judge_top_k: int = integer(5, least=1)
    judge_ratio: float = number(0.1, most=1)
    commit_correction: bool = flag(False)
    stop: str = choice("filled", ("filled", "end"))  # others count steps

    papers = ("2505.21467",)
    protocol = "masked"
    draft_protocol = "causal"
    reference = "the judge at temperature 0"
    guarantee = "approximate"

    @property
    def drafted(self) -> bool:
        """True: the judge comes as the draft model."""
        return True

    @property
    def constraint_refusal(self) -> str:
        """Nothing: accepted tokens are committed by the masked loop, which checks them."""
        return ""

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        """Decode every item of the target; see ``Sampler``.

        Args:
            target: masked model with its prompts.
            rng: random numbers by item and position.
            draft: target of the judge for the same items and positions.
            canvas: tokens long [N, T], masked where one is wanted; None: masked everywhere.
            trace: whether to record the positions of every step.
            callback: called after every step.

        Raises:
            GenError: the judge is missing or has other token ids.
        """
        if target.space.mask_token_id is None:
            raise GenError(
                "guided_diffusion needs a token space with a mask token; this model has none"
            )
        judge = Judge(self, target, draft)
        out = decode_masked(
            target,
            rng,
            MaskedIterative(order="confidence", choice_temperature=0.0, stop=self.stop),
            canvas=canvas,
            trace=trace,
            callback=callback,
            overrides={"proposer": judge.propose, "selector": accepted_positions},
            followers=(judge.target,),
        )
        stats = [replace(s, draft_nfe=n) for s, n in zip(out.stats, judge.nfe, strict=True)]
        return replace(out, stats=stats)


def accepted_positions(step: MaskedStep) -> Tensor:
    """Selector of the positions that the judge accepted in this step: bool [b, T]."""
    return step.memory["accepted"]


class Judge:
    """Causal model with a cache of the tokens that it read last.

    Its target follows the rows of the masked one; ``step.memory["judged_tokens"]`` long [b, T] are
    the tokens that its cache holds.

    Args:
        rule: the sampler.
        target: target of the masked model.
        draft: target of the judge.

    Attributes:
        nfe: forward passes of the judge per item.

    Raises:
        GenError: the judge is missing or has other token ids than the masked model.
    """

    def __init__(self, rule: GuidedDiffusion, target, draft: CausalTarget | None):
        if draft is None:
            raise GenError(
                "guided_diffusion needs a causal model to verify tokens and got none;"
                " expected its name in sampler.draft_model"
            )
        ours, theirs = target.space, draft.space
        if ours.vocab_size != theirs.vocab_size or ours.length != theirs.length:
            raise GenError(
                f"the judge has {theirs.vocab_size} token ids and {theirs.length} positions;"
                f" expected the masked model's {ours.vocab_size} and {ours.length}"
            )
        if not torch.equal(target.legal, draft.legal.to(target.device)):
            raise GenError(
                "the judge's legal token ids are not the masked model's; expected a model of the"
                " same tokens"
            )
        if theirs.constraint is not None and theirs.constraint is not ours.constraint:
            raise GenError(
                "the judge's token space has a constraint that the masked model's has not; expected"
                " the same object in both, or one in the masked model's space alone"
            )
        self.rule = rule
        raw = SamplingParams(guidance_scale=draft.sampling.guidance_scale)
        self.target: Any = draft.with_params(raw)
        if ours.constraint is not None:
            self.target = self.target.with_space(replace(theirs, constraint=ours.constraint))
        self.target.at_most(target.rows)
        self.nfe = [0] * draft.items
        self.draw: Any = registry.get("proposer", "categorical")

    def propose(self, step: MaskedStep) -> Tensor:
        """Draw a token for every masked position [b, T], and store which of them are accepted."""
        tokens = torch.where(step.masked, self.draw(step), step.canvas)
        position, total = step.positions, tokens.shape[1]
        start = self.first_stale(step, tokens)
        step.memory["judged_tokens"] = tokens
        width = total - int(start.min())
        columns = start[:, None] + torch.arange(width, device=tokens.device)
        # a column beyond the canvas repeats the row's first
        columns = torch.where(columns < total, columns, start[:, None])
        inputs = tokens.gather(1, (columns - 1).clamp_min(0))
        logprobs = self.target.predict(inputs, columns).logprobs
        for item in step.rows.tolist():
            self.nfe[item] += 1
        accepts, best = self.verdict(logprobs, tokens.gather(1, columns))
        back = (position - start[:, None]).clamp(0, width - 1)
        rejected = step.masked & ~accepts.gather(1, back)
        first = torch.where(rejected, position, total).amin(1, keepdim=True)
        failed = has_no_distribution(logprobs).gather(1, back) & step.masked & (position <= first)
        refuse_failed(self.target, step.rows.cpu().numpy(), first_failed(failed).cpu().numpy())
        accepted = step.masked & (position < first)
        if self.rule.commit_correction:
            accepted |= position == first
            tokens = torch.where(position == first, best.gather(1, back), tokens)
        step.memory["accepted"] = accepted
        return tokens

    def first_stale(self, step: MaskedStep, tokens: Tensor) -> Tensor:
        """Find the first position [b] to judge.

        That is the first masked one, or the first whose left neighbour is not what the cache holds.
        A row that begins is judged from position 0, before which the prompt stands.
        """
        cached = step.recall("judged_tokens", torch.full_like(tokens, -1))
        stale = torch.where(cached != tokens, step.positions + 1, tokens.shape[1]).amin(1)
        first_masked = step.masked.long().argmax(1)
        return torch.minimum(first_masked, stale).masked_fill(cached[:, 0] < 0, 0)

    def verdict(self, logprobs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Judge tokens [b, W] by the judge's distribution [b, W, V].

        Returns:
            Accepted tokens, bool [b, W], and the likeliest ones, long [b, W].
        """
        logp = logprobs.gather(-1, tokens[..., None])
        number = torch.arange(logprobs.shape[-1], device=logprobs.device)
        better = (logprobs > logp) | ((logprobs == logp) & (number < tokens[..., None]))
        accepts = (better.sum(-1) < self.rule.judge_top_k) & logp[..., 0].isfinite()
        top, best = logprobs.max(-1)
        if self.rule.agree == "relative" and self.rule.judge_ratio > 0:
            accepts &= logp[..., 0] >= top + log(self.rule.judge_ratio)
        return accepts, best
