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

from gen.core.method import method
from gen.core.params import Params, integer
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import CopyTable


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
