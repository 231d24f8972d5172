"""Selectors and a proposer that look at more than one step. ``selectors`` has those that remember
nothing, and the letters.

    klass     c_i >= t, and KL(p_i now || p_i one step before) < ``kl_threshold`` in each of the
              last ``history`` steps. KLASS (arXiv 2511.05664). What a law was is remembered across
              blocks, as in the authors' code. Where nothing is stable, they commit the schedule's
              count; here it is one place
    coherent  places that were among the ``buffer_size`` of highest score in each of the last
              ``history`` steps, this one counted, with the same id proposed each time. A block's
              first step begins anew. CCD (arXiv 2512.02044) with the number of steps left open
              (CCD-DS); that their buffer grows late in decoding is left out
    regions   in this order, each rule looking at what the ones before it leave empty: c_i >= t, or
              else the best place; then all empty places of any three in a row that the block has,
              at most one of them known, whose mean c is at least l; then the surest one of any run
              of two or more that want the same id, if its c >= l; then places for which the same id
              was proposed in each of the last ``history`` steps of the block, if c_i >= l. R2-dLLM
              (arXiv 2604.18995)
    credit    a proposer. Every empty place keeps a credit k(v) per id, 0 when a block begins. In
              each step k is multiplied by ``credit_decay``, p(v) to the power of ``credit_power``
              is added to it for the likeliest id v, and the law becomes p(v) (1 + k(v)) **
              ``credit_weight``, normalised. What was likely again and again gains. CreditDecoding
              (arXiv 2510.06133)

``credit`` changes the law itself, the final one and the raw one, for everything that comes after it
in that step: confidence, order, selector, remasker. So the id that is committed is the likeliest
one of the fused law, and any selector may stand behind it; the paper's is ``threshold``.

"Id" is what is proposed, so under the proposer ``argmax`` the likeliest one, as in the papers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.parts.selectors import best_of_each, runs_of, sure, sure_or_best
from gen.samplers.masked.step import MaskedStep, highest

WINDOW, KNOWN = 3, 1  # R2-dLLM: so many places in a row, at most so many of them known


@register("selector", "klass")
def klass(step: MaskedStep) -> Tensor:
    """Sure, and no longer moving."""
    logprobs = step.confidence_logprobs()
    before = step.recall(
        "klass_law", torch.full_like(logprobs, -torch.inf)
    )  # nothing is close to that
    p = logprobs.double().exp()
    moved = torch.where(p > 0, p * (logprobs.double() - before.double()), 0).sum(-1).clamp_min(0)
    count = step.recall("klass_stable", torch.zeros_like(step.canvas))
    stable = torch.where(
        step.fresh, torch.where(moved < step.params.kl_threshold, count + 1, 0), count
    )
    step.memory.update(
        klass_law=torch.where(step.fresh[..., None], logprobs, before), klass_stable=stable
    )
    return sure(step) & (stable >= step.params.history)


@register("selector", "coherent")
def coherent(step: MaskedStep) -> Tensor:
    """Wanted early, and still wanted."""
    top = highest(step.score, step.eligible, torch.full_like(step.rows, step.params.buffer_size))
    return top & (_same(step, "coherent", top) >= step.params.history)


@register("selector", "regions")
def regions(step: MaskedStep) -> Tensor:
    """What its neighbours or its past already tell."""
    confidence, low = step.confidence, step.params.low_threshold
    chosen = sure_or_best(step)
    chosen = chosen | _windows(step, step.eligible & ~chosen)
    rest = step.eligible & ~chosen
    run = runs_of(rest, step.proposed_tokens)
    length = (
        run.new_zeros(len(run), run.shape[1] + 1).scatter_add(1, run, rest.long()).gather(1, run)
    )
    chosen = chosen | (best_of_each(confidence, rest & (length >= 2), run) & (confidence >= low))
    steady = _same(step, "regions", step.eligible) >= step.params.history
    return chosen | (step.eligible & steady & (confidence >= low))


def _windows(step: MaskedStep, empty: Tensor) -> Tensor:
    """The places of ``empty`` (bool [b, T]) in windows that are mostly empty and sure on
    average."""
    if empty.shape[1] < WINDOW:
        return torch.zeros_like(empty)
    known = step.open & ~empty & (~step.masked | step.eligible)

    def slide(x):
        return x.double().unfold(1, WINDOW, 1)

    gaps = slide(empty).sum(-1)
    mean = slide(step.confidence.masked_fill(~empty, 0)).sum(-1) / gaps.clamp_min(1)
    fits = (
        (slide(empty | known).sum(-1) == WINDOW)
        & (gaps >= WINDOW - KNOWN)
        & (mean >= step.params.low_threshold)
    )
    covered = torch.zeros_like(empty)
    for at in range(WINDOW):
        covered[:, at : at + fits.shape[1]] |= fits
    return covered & empty


def _same(step: MaskedStep, name: str, among: Tensor) -> Tensor:
    """For how many steps of the block, this one counted, each place has been in ``among`` (bool [b,
    T]) with the same id proposed: long [b, T]."""
    nothing = torch.full_like(step.proposed_tokens, -1)
    before = torch.where(step.is_first_step[:, None], nothing, step.recall(f"{name}_ids", nothing))
    count = (
        torch.where(
            step.proposed_tokens == before,
            step.recall(f"{name}_count", torch.zeros_like(nothing)),
            0,
        )
        + 1
    )
    step.memory.update(
        {f"{name}_ids": torch.where(among, step.proposed_tokens, -1), f"{name}_count": count}
    )
    return torch.where(among, count, 0)


@register("proposer", "credit")
def credit(step: MaskedStep) -> Tensor:
    """The likeliest id of the law, fused with what was likely before: [b, T]. From here on, the
    step has the fused law."""
    params, judged = step.params, step.confidence_logprobs()
    credits = (
        step.recall("credit", torch.zeros_like(judged)).masked_fill(
            step.is_first_step[:, None, None], 0
        )
        * params.credit_decay
    )
    top, ids = judged.max(-1, keepdim=True)
    credits = credits.scatter_add(
        -1, ids, (top * params.credit_power).exp().masked_fill(~step.masked[..., None], 0)
    )
    step.memory["credit"] = credits

    def fuse(logprobs):
        return (logprobs + params.credit_weight * credits.log1p()).log_softmax(-1)

    raw = step.prediction.raw_logprobs
    if params.confidence_on == "raw":
        fused = fuse(judged)
        step.replace_logprobs(fuse(step.logprobs), lambda: fused)
    else:
        step.replace_logprobs(fuse(step.logprobs), lambda: fuse(raw()))
    return step.confidence_logprobs().argmax(-1)
