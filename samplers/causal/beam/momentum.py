"""Momentum decoding: the most likely token, unless it repeats what the text holds already.

Of the ``candidates`` most likely tokens v, with text x_1 .. x_n (prompt included):

    x_{n+1} = argmax p(v) - resistance * f(r(v))
    r(v)    tokens of the longest end of (x_1 .. x_n, v) that stands in x_1 .. x_n; 0 if v does not
    f(r)    r up to 5, infinite above; equal values go to the more likely token

A new token meets no resistance, so the rule is greedy decoding until the text begins to repeat.

Reference: Lan et al., "Momentum Decoding: Open-ended Text Generation As Graph Exploration" (arXiv
2212.02175). ``resistance`` 0.2, 5 candidates and f are those of their code for GPT2-XL.
Guarantee: approximate, a deterministic rule: no seed changes the tokens. Resistance 0 is greedy
decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.method import GREEDY_DECODING, Limit, method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import Text
from gen.samplers.engine.causal_loop import CausalSampler, Drafter
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.hypotheses import DeterministicSampler, first_largest
from gen.samplers.engine.outputs import NONE

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget

LONGEST = 6  # repetitions of so many tokens and more meet an infinite resistance


class Resistance(Drafter):
    """Drafter that drafts nothing: every step takes the token that the rule chooses."""

    window = 1

    def __init__(self, params: Momentum, target: CausalTarget):
        self.params, self.target = params, target

    def propose(self, step, tokens):
        rows = self.target.rows
        prompt, length = self.target.prompt[:rows], self.target.prompt_length[:rows]
        ids, end = joined(prompt, length, tokens), length + step.start
        known = torch.arange(ids.shape[1], device=ids.device) < end[:, None]
        self.text = Text(torch.where(known, ids, NONE), end, 0)
        return Draft.none(tokens, step.valid)

    def verify(self, step, draft, output):
        every, strength = output.logprobs[:, 0], self.params.resistance
        ids, logprobs = first_largest(every, min(self.params.candidates, every.shape[-1]))
        # tokens before each column that are the last ones of the text, [b, 1, S]
        before = F.pad(self.text.matches(self.text.last(LONGEST - 1)[:, None]), (1, -1))
        found = self.text.ids[:, None] == ids[..., None]
        repeated = torch.where(found, before + 1, 0).amax(-1)
        resistance = torch.where(repeated < LONGEST, repeated.to(logprobs), torch.inf)
        score = logprobs.exp()
        if strength:
            score = score - strength * resistance
        score = score.masked_fill(logprobs == -torch.inf, -torch.inf)
        # a row whose candidates all are beyond any resistance takes the first one, the most likely
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        return Verdict(torch.zeros_like(step.start), ids.gather(1, best))


def joined(prompt: Tensor, length: Tensor, tokens: Tensor) -> Tensor:
    """Put tokens [b, T] behind the first ``length`` [b] tokens of prompts [b, P]: [b, P + T]."""
    column = torch.arange(prompt.shape[1] + tokens.shape[1], device=prompt.device)
    source = column + torch.where(column < length[:, None], 0, (prompt.shape[1] - length)[:, None])
    last = prompt.shape[1] + tokens.shape[1] - 1
    return torch.cat([prompt, tokens], 1).gather(1, source.clamp_max(last))


@method(
    "momentum",
    sampler="momentum_decoding",
    about="greedy decoding with a penalty on tokens that repeat the text",
    paper="2212.02175",
    title="Momentum Decoding: Open-ended Text Generation As Graph Exploration",
    limit=Limit(GREEDY_DECODING, {"resistance": 0.0}),
)
@register("sampler", "momentum_decoding")
@dataclass(frozen=True)
class Momentum(DeterministicSampler, CausalSampler):
    """Take the most likely token unless it repeats the text.

    ``resistance``: probability that a candidate loses per token of the repetition it would make.
    ``candidates``: most likely tokens that compete.
    """

    resistance: float = number(0.2)
    candidates: int = integer(5, least=1)

    papers = ("2212.02175",)

    def make_drafter(self, target, draft):
        return Resistance(self, target)
