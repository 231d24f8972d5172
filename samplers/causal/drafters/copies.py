"""Drafters that copy: what followed the last tokens where they stood before. Nothing is random, and
nothing is kept between steps.

    prompt_lookup  copies in the prompt or the output. The longest of the last ``max_ngram`` tokens
                   that stood before counts, and of several occurrences the first, as in
                   transformers. Saxena, "Prompt Lookup Decoding"
                   (https://github.com/apoorvumang/prompt-lookup-decoding);
                   ``prompt_lookup_num_tokens`` of transformers and the method ``ngram`` of vLLM
    input_copy     copies the prompt, for outputs that are the input with few changes. The output
                   begins as a copy of the prompt's beginning. After a change the longest match of
                   the last tokens with the prompt decides where copying goes on; a longest match at
                   several columns of the prompt copies nothing. The beginning of the output matches
                   the beginning of the prompt. Sun et al., "Instantaneous Grammatical Error
                   Correction with Shallow Aggressive Decoding" (arXiv 2106.04970); Ge et al.,
                   "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding" (arXiv
                   2205.10350). They ask for greedy decoding; the verifier decides that here
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import method
from gen.core.params import Params, integer
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import Table, Text
from gen.samplers.engine.draft import RANKS, Draft
from gen.samplers.engine.outputs import NONE


class CopyTable(Table):
    """Copies tokens one after the other: every node has one child, which is no random draw.

    Attributes:
        source: text that is copied from.
        at: first column of it that is copied, long [b]; behind its end where nothing is.
    """

    draws = (RANKS,)
    source: Text
    at: Tensor

    def weigh(self, tails, parents, depth):
        ids = self.source.next(self.at[:, None] + depth)[..., None]
        return self.add_up(ids, torch.ones_like(ids))

    def chain(self, step, tokens):
        self.text = self.context.read(step, tokens)
        self.look(self.text)
        depth = torch.arange(step.positions.shape[1] - 1, device=tokens.device)
        ids = self.source.next(self.at[:, None] + depth)
        at = (step.start[:, None] + depth).clamp_max(len(self.legal) - 1)
        # the last position before one where a row stops is the target's own
        exists = (ids >= 0) & (depth + 1 < step.left[:, None]) & self.legal[at, ids.clamp_min(0)]
        return Draft(ids.clamp_min(0), exists.cummin(1).values)


@dataclass(frozen=True)
class LookupParams(Params):
    """Parameters of prompt lookup.

    Attributes:
        max_ngram: last tokens that are looked for at most.
        min_ngram: last tokens that must have stood before at least.
    """

    max_ngram: int = integer(3, least=1)
    min_ngram: int = integer(1, least=1)


@method(
    "prompt_lookup",
    about="copies what followed the last tokens in the prompt or the output",
    sampler="speculative",
    params={"drafter": "prompt_lookup", "verifier": "follow", "num_speculative_tokens": 10},
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
    title="Prompt Lookup Decoding",
    aliases={
        "prompt_lookup_num_tokens": "num_speculative_tokens",
        "max_matching_ngram_size": "max_ngram",
        "prompt_lookup_max": "max_ngram",
        "prompt_lookup_min": "min_ngram",
    },
)
@register("drafter", "prompt_lookup", params=LookupParams)
class PromptLookup(CopyTable):
    """Copies what followed the last tokens in the prompt or the output."""

    def look(self, text):
        lengths = text.matches(text.last(self.params.max_ngram)[:, None])[:, 0]
        longest = lengths.amax(1)
        # the first column of the longest match
        first = (lengths == longest[:, None]).byte().argmax(1)
        copies = longest >= self.params.min_ngram
        self.source, self.at = text, torch.where(copies, first + 1, text.ids.shape[1])


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
