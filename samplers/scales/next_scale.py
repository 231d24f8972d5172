"""Next-scale decoding of VAR: one forward pass per scale (Tian et al., arXiv 2404.02905).

    x_k,i ~ p_k,i(. | f_hat_<k)   for all positions i of scale k at once,   k = 0..S-1

The tokens of a scale are independent of each other given the scales before it; that product is the
model's own distribution, with the guidance of each scale (``gen.models.targets.scales``).

    early        the draft model makes the scales after the first ``early`` ones, given the tokens
                 of those (CoDe, Chen et al., arXiv 2411.17787)
    more_smooth  a mixture of codes replaces every token in the sum: with r = k / (S - 1),

                     soft = softmax(((1 + r) log p + G) / t) @ codebook,  t = max(.27 (1 - .95 r),
                     .005)

                 and G Gumbel noise. The tokens are those of the final sum, quantised once more

Guarantee: the product of all scales, drawn as it is. ``early`` and ``more_smooth`` have none; with
``early`` at the number of scales, the draft model is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.params import flag, param
from gen.core.registry import register
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput
from gen.models.targets.scales import ScalesTarget
from gen.samplers.scales.loop import ScalesRun, fill_scale


@register("sampler", "next_scale")
@dataclass(frozen=True)
class NextScale(Sampler):
    """Draw all tokens of a scale per forward pass, coarse to fine.

    ``early``: scales of the model itself, the others are the draft model's; None for all.
    ``draft_model``: name of a model; None for the modality's own. ``more_smooth``: mixtures of
    codes in place of tokens.
    """

    early: int | None = param(None, int, 0, also=(None,), expected="a number of scales, or None")
    draft_model: str | None = None
    more_smooth: bool = flag(False)

    protocol = "scales"
    papers = ("2404.02905", "2411.17787")
    reference = "the product of the model's scales"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.more_smooth and self.drafted:
            raise GenError(
                "sampler.more_smooth is true, and sampler.early hands tokens to a draft model;"
                " expected one of them"
            )
        if self.draft_model is not None and not self.drafted:
            raise GenError("sampler.draft_model is given without sampler.early; expected both")

    @property
    def guarantee(self) -> str:
        return "approximate" if self.drafted or self.more_smooth else "same_distribution"

    @property
    def drafted(self) -> bool:
        return self.early is not None

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        run = ScalesRun(target, rng, canvas, trace, callback)
        if self.more_smooth:
            return smooth(run)
        scales, drafts = len(target.slices), draft if self.drafted else None
        early = scales if self.early is None else self.early
        while target.scale < scales and not run.is_over():
            ids = run.here
            source = drafts if target.scale >= early else None
            if source is not None:
                read_scales(source, target.scale, run.tokens)
            fill_scale(run, source)
            target.commit(run.tokens[:, ids])
        return run.output(None if drafts is None else [drafts.passes] * len(run.rows))


def read_scales(draft: ScalesTarget, scale: int, tokens: Tensor) -> None:
    """Let a draft model read the scales before one: long [B, T].

    A model that keeps keys runs for each of them; of a Markov one their sum is enough.
    """
    while draft.scale < scale:
        if not draft.model.markov and draft.passes <= draft.scale:
            draft.predict()
        draft.commit(tokens[:, draft.here])


@torch.no_grad()
def smooth(run: ScalesRun) -> SampleOutput:
    """Fill all scales with mixtures of codes; see the module.

    Raises:
        GenError: a canvas with known tokens.
    """
    target, quantize, scales = run.target, run.target.model.quantize, len(run.target.slices)
    if bool(run.prefilled.any()):
        raise GenError(
            "the canvas holds tokens, and sampler.more_smooth makes none; expected it to be false"
        )
    passes = []
    for scale in range(scales):
        output, ratio = target.predict(), scale / (scales - 1) if scales > 1 else 0.0
        shape = output.logprobs.shape
        numbers = run.positions[..., None] * shape[-1] + torch.arange(
            shape[-1], device=run.rows.device
        )
        u = run.rng.uniform(run.rows, numbers.flatten(1), "more_smooth", None).view(shape)
        noisy = (1 + ratio) * output.logprobs.double() - (-u.log()).log()
        run.draw(output.logprobs, 0, torch.zeros_like(run.positions, dtype=torch.bool))
        soft = (noisy / max(0.27 * (1 - 0.95 * ratio), 0.005)).softmax(-1)
        table = quantize.embedding.weight[: shape[-1]]
        passes.append((output, run.here))
        run.tokens[:, run.here], run.known[:, run.here] = noisy.argmax(-1), True
        target.commit_vectors(soft.to(table.dtype) @ table)
        run.report()
    final = quantize.encode(target.f_hat)
    for scale, (output, here) in enumerate(passes):
        target.scale = scale
        every = torch.ones_like(final[:, here], dtype=torch.bool)
        run.record(output, every, final[:, here], every)
    return run.output()
