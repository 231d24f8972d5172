"""ADJUST: several positions per forward pass, drawn one after the other.

    for j = 1, ..., k:
    position   the masked position that ``order`` puts first under p_j
    token      drawn from p_j at that position
    p_j+1      p_j adjusted to the token by a small layer on the hidden states
               (``gen.samplers.masked.adjust_layer``); p_1 is that of the forward pass

So the tokens of a pass come from a joint distribution, where other samplers draw from the product
of the marginals p_1. The order sees no drawn token. A position has one random number per forward
pass, which counts once its token is committed: with k = 1 the tokens are those of the same sampler
without the layer. The layer never sees a token that is not committed, only those of the canvas. Its
own passes are not counted as forward passes of the model, whose cost is that of all its layers.

Reference: "Enabling Approximate Joint Sampling in Diffusion LMs" (arXiv 2509.22738).
Guarantee: approximate.
Parameters: ``adjust_layer``, a trained layer; ``adjust_commits``, k (1: one position per forward
pass). Without a layer that was trained for the model, train one: ``gen.recipes.text.adjust``.
Preset: ``adjust``, four positions per forward pass, the most certain first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, integer, text
from gen.core.registry import register
from gen.samplers.masked.adjust_layer import AdjustLayer, embedded
from gen.samplers.masked.chains.chain import marginal_order
from gen.samplers.masked.step import HIDDEN_STATES, MaskedStep, Prediction, highest, needs

KEY = "adjusted"  # of the positions that the proposer drew, in the memory of a step


@dataclass(frozen=True)
class CommitParams(Params):
    """``adjust_commits``: positions per forward pass."""

    adjust_commits: int = integer(4, least=1)


@dataclass(frozen=True)
class AdjustParams(CommitParams):
    """``adjust_layer``: folder of a trained layer, or the name of a built-in one."""

    adjust_layer: str = text("", "a folder with a trained layer, or the name of an embedded one")


@method(
    "adjust",
    paper="2509.22738",
    title="Enabling Approximate Joint Sampling in Diffusion LMs",
    about="ADJUST: a small layer updates the other positions after each token of a forward pass",
    params={
        "proposer": "adjusted",
        "selector": "adjusted",
        "adjust_layer": "text-adjust",
        "adjust_commits": 4,
        "order": "entropy",
        "confidence_on": "raw",
        "steps": 1024,
        "schedule": "linear",
    },
    limit=Limit(SEQUENTIAL, {"adjust_commits": 1, "proposer": "categorical", "adjust_layer": ""}),
    # the layer was trained for one model, and the contract's have no hidden states
    example={"proposer": "categorical", "adjust_layer": ""},
)
@register("selector", "adjusted", params=CommitParams)
def adjusted(step: MaskedStep) -> Tensor:
    """Selects the positions that the proposer drew one after the other, or else the
    ``adjust_commits`` first."""
    if KEY in step.memory:
        return step.memory[KEY]
    return highest(
        step.score, step.eligible, torch.full_like(step.rows, step.params.adjust_commits)
    )


@register("proposer", "adjusted", params=AdjustParams)
@needs(HIDDEN_STATES)
class Adjusted:
    """Proposer that draws the positions of a forward pass one after the other.

    Args:
        params: parameters of the sampler.
        device: device of the layer.
        layer: a layer in place of the named one.

    Attributes:
        layer: the trained layer.
        digest: digest of the weights that it was trained for; empty for any.

    Raises:
        GenError: no layer is named, the named one does not exist, or the order reads drawn tokens.
    """

    def __init__(
        self,
        params: AdjustParams,
        device: torch.device | str = "cpu",
        layer: AdjustLayer | None = None,
    ):
        if not params.adjust_layer and layer is None:
            raise GenError(
                "sampler.adjust_layer is '', where proposer is 'adjusted'; expected a folder with a"
                f" trained layer, or one of {', '.join(embedded())}"
            )
        self.layer = layer or AdjustLayer.from_pretrained(params.adjust_layer, device)
        self.digest = self.layer.target

    def __call__(self, step: MaskedStep) -> Tensor:
        order = marginal_order(step.params.order or "confidence")
        self.layer.to(step.states.hidden.dtype)
        states, canvas, tokens = step.states, step.canvas, step.canvas
        logprobs, raw = step.logprobs, step.raw_logprobs()
        logq, rawq, drawn = logprobs, raw, torch.zeros_like(step.masked)
        for number in range(step.params.adjust_commits):
            if number:
                states = states.adjusted(self.layer, canvas)
                logprobs, of_model = states.logprobs(canvas)
                raw = of_model()
                # what is drawn already keeps the distribution that it came from
                logq = torch.where(drawn[..., None], logq, logprobs)
                rawq = torch.where(drawn[..., None], rawq, raw)
            seen = replace(step.view, tokens=canvas, masked=step.masked & ~drawn)
            now = Prediction(logprobs, lambda raw=raw: raw, step.fresh)
            score = order(replace(step, view=seen, prediction=now))
            first = highest(score, step.eligible & ~drawn, torch.ones_like(step.rows))
            tokens = torch.where(first, draw(step, logprobs, first), tokens)
            canvas, drawn = torch.where(first, tokens, canvas), drawn | first
        rest = step.masked & ~drawn
        step.replace_logprobs(logq, lambda: rawq)
        step.memory[KEY] = drawn
        return torch.where(rest, draw(step, logprobs, rest), tokens)


def draw(step: MaskedStep, logprobs: Tensor, active: Tensor) -> Tensor:
    """Draw tokens [b, T] at active positions, with the random numbers of this forward pass."""
    return step.rng.categorical(
        logprobs, step.rows, step.positions, "propose", step.step_index, active
    )
