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

from gen.core.method import method
from gen.core.params import Params, integer
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import CopyTable, Text
from gen.samplers.engine.outputs import NONE


@dataclass(frozen=True)
class CopyParams(Params):
    """Parameters of input copying.

    Attributes:
        max_match: last tokens that are compared at most.
        min_match: last tokens that must match, the beginning being one of them.
    """

    max_match: int = integer(16, least=1)
    min_match: int = integer(1, least=1)


@method(
    "aggressive",
    about="copies the prompt, and goes on where the last tokens match it again",
    sampler="speculative",
    params={"drafter": "input_copy", "verifier": "follow", "num_speculative_tokens": 16},
    paper="2106.04970",
    title="Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding",
)
@register("drafter", "input_copy", params=CopyParams)
class InputCopy(CopyTable):
    """Copies the prompt, and goes on where the last tokens match it again."""

    def look(self, text):
        """Match the output, with its beginning, against the prompt, with its own."""
        width, mark = self.context.prompts.shape[1], self.size  # the mark stands for a beginning
        output = text.own + width  # first column of the output, which is no input
        ids = text.ids[:, text.own - 1 : output]
        known = ids[:, 1:] != NONE
        start = torch.where(known.any(1), known.byte().argmax(1), width)
        column = torch.arange(1 + width, device=ids.device)
        prompt = Text(torch.where(column == start[:, None], mark, ids), text.end, 0)
        at = text.end[:, None] - torch.arange(self.params.max_match, 0, -1, device=ids.device)
        tail = text.ids.gather(1, at.clamp_min(0))
        tail = torch.where(at < output, torch.where(at == output - 1, mark, NONE), tail)
        lengths = prompt.matches(tail[:, None])[:, 0]
        longest = lengths.amax(1)
        best = lengths == longest[:, None]
        copies = (longest >= self.params.min_match) & (best.sum(1) == 1)
        self.source = Text(text.ids[:, :output], text.end, text.own)
        self.at = torch.where(copies, best.byte().argmax(1) + text.own, output)
