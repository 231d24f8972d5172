"""Prompt lookup: copy what followed the last tokens where they stood before, in the prompt or the
output.

The longest of the last ``max_ngram`` tokens that stood before counts, and of several occurrences
the first, as in transformers. Saxena, "Prompt Lookup Decoding"
(https://github.com/apoorvumang/prompt-lookup-decoding); ``prompt_lookup_num_tokens`` of
transformers and the method ``ngram`` of vLLM.

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
from gen.samplers.causal.drafters.tables import TableNodes, TableSource
from gen.samplers.engine.draft import RANKS, Draft
from gen.samplers.engine.step_context import CausalStep


@dataclass(frozen=True)
class LookupParams(Params):
    """Parameters of prompt lookup.

    Attributes:
        max_ngram: last tokens that are looked for at most.
        min_ngram: last tokens that must have stood before at least.
    """

    max_ngram: int = integer(3, least=1)
    min_ngram: int = integer(1, least=1)


class CopyNodes(TableNodes):
    """Nodes that copy tokens one after the other, from a column on."""

    def source(self, text: Text) -> tuple[Tensor, Tensor]:
        """Find the columns [b] that are copied from, and the rows that copy, bool [b]."""
        raise NotImplementedError

    def weigh_root(self, step: CausalStep, text: Text) -> Tensor:
        self.at, self.copies = self.source(text)
        return self._copied(text, torch.zeros_like(self.at)[:, None])[:, 0]

    def weigh(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        return self._copied(self.text, tree.depth[:, first:])

    def _copied(self, text: Text, depth: Tensor) -> Tensor:
        at = self.at[:, None] + depth
        copied = self.copies[:, None] & (at < self.limit(text))
        return self.one_hot(torch.where(copied, text.next(at), NONE))

    def limit(self, text: Text) -> int:
        """Return the first column that is not copied."""
        return text.ids.shape[1]


class LookupNodes(CopyNodes):
    """Nodes that copy what followed an earlier occurrence of the last tokens."""

    def __init__(self, target: CausalTarget, params: LookupParams):
        super().__init__(target)
        self.params = params

    def source(self, text: Text) -> tuple[Tensor, Tensor]:
        lengths = text.matches(text.last(self.params.max_ngram)[:, None])[:, 0]
        longest = lengths.amax(1)
        # the first column of the longest match
        first = (lengths == longest[:, None]).byte().argmax(1)
        return first + 1, longest >= self.params.min_ngram


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
class PromptLookup(TableSource):
    """Copies what followed the last tokens in the prompt or the output."""

    draws = (RANKS,)

    nodes_type = LookupNodes
