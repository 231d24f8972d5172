"""Input copying, for outputs that are the input with few changes: copy the prompt; after a change
go on copying behind the one span of it that the last tokens match.

The output begins as a copy of the prompt's beginning. The longest match of the last tokens with the
prompt decides where copying goes on; a longest match at several columns of the prompt copies
nothing. The beginning of the output matches the beginning of the prompt.

Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding" (arXiv
2106.04970); Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding"
(arXiv 2205.10350). They ask for greedy decoding; the verifier decides that here.

Nothing is random, and nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import method
from gen.core.params import Params, integer
from gen.core.registry import register
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.context import NONE, Text
from gen.samplers.causal.drafters.prompt_lookup import CopyNodes
from gen.samplers.causal.drafters.tables import TableSource
from gen.samplers.engine.draft import RANKS


@dataclass(frozen=True)
class CopyParams(Params):
    """Parameters of input copying.

    Attributes:
        max_match: last tokens that are compared at most.
        min_match: last tokens that must match, the beginning being one of them.
    """

    max_match: int = integer(16, least=1)
    min_match: int = integer(1, least=1)


class InputNodes(CopyNodes):
    """Nodes that copy the prompt."""

    def __init__(self, target: CausalTarget, params: CopyParams):
        super().__init__(target)
        self.params = params

    def begin(self, step, tokens):
        known = self.context.prompts[step.rows] != NONE
        # the column before the first token of each prompt, counted with one column in front
        self.start = torch.where(known.any(1), known.byte().argmax(1), known.shape[1])
        return super().begin(step, tokens)

    def source(self, text: Text) -> tuple[Tensor, Tensor]:
        """Match the output, with its beginning, against the prompt, with its own."""
        width, mark = self.context.prompts.shape[1], self.size
        column = torch.arange(1 + width, device=text.ids.device)
        ids = text.ids[:, text.own - 1 : text.own + width]
        prompt = torch.where(column == self.start[:, None], mark, ids)
        back = torch.arange(self.params.max_match, 0, -1, device=text.ids.device)
        at = text.end[:, None] - back - (text.own + width)  # positions of the output
        tail = text.ids.gather(1, (at + text.own + width).clamp_min(0))
        tail = torch.where(at < 0, torch.where(at == -1, mark, NONE), tail)
        lengths = Text(prompt, text.end, 0).matches(tail[:, None])[:, 0]
        longest = lengths.amax(1)
        best = lengths == longest[:, None]
        copies = (longest >= self.params.min_match) & (best.sum(1) == 1)
        return best.byte().argmax(1) + text.own, copies

    def limit(self, text: Text) -> int:
        return text.own + self.context.prompts.shape[1]  # the output is no input


@method(
    "aggressive",
    about="copies the prompt, and goes on where the last tokens match it again",
    sampler="speculative",
    params={"drafter": "input_copy", "verifier": "follow", "num_speculative_tokens": 16},
    paper="2106.04970",
    title="Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding",
)
@register("drafter", "input_copy", params=CopyParams)
class InputCopy(TableSource):
    """Copies the prompt, and goes on where the last tokens match it again."""

    draws = (RANKS,)

    nodes_type = InputNodes
