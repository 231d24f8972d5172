"""Draft vocabulary: only the most frequent tokens may be drafted, with any source of drafts.

The distribution that drafts are drawn from is that of the source without the other tokens,
renormalised; the eos token always stays. What is committed follows the target all the same. Which
tokens are frequent says a table of the target's own output, or the item's own text. A draft model
still computes all its logits here, so that the gain is in acceptance alone.

Goel et al., "VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding in LLMs" (arXiv
2506.22694); Zhao et al., "FR-Spec" (arXiv 2502.14856).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.method import method
from gen.samplers.causal.drafters.tables import Context
from gen.samplers.engine.outputs import NONE

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.models.targets.token_table import TokenTable
    from gen.samplers.engine.step_context import CausalStep


class DraftVocab:
    """Tokens that may be drafted, ``count`` of them, by statistics of the model's tokens; without a
    table by counts in each row's own text."""

    def __init__(self, target: CausalTarget, count: int, table: TokenTable | None):
        self.size, self.ends = target.legal.shape[-1], target.space.ends
        self.count = min(count, self.size)
        self.context = Context(target) if table is None else None
        self.kept = None if table is None else self._frequent(table.counts[None])

    def begin(self, step: CausalStep, tokens: Tensor) -> DraftVocab:
        """Read the texts of a step, committed tokens long [b, T], and return itself."""
        if self.context is not None:
            ids = self.context.read(step, tokens).ids
            ids = torch.where(ids == NONE, self.size, ids)
            counts = torch.zeros(len(ids), self.size + 1, dtype=torch.long, device=ids.device)
            counts.scatter_add_(1, ids, torch.ones_like(ids))
            self.kept = self._frequent(counts[:, : self.size])
        return self

    def trim(self, logq: Tensor) -> Tensor:
        """Renormalise log-probabilities [b, n, V] over the tokens that stay."""
        assert self.kept is not None, "begin comes first"
        logq = torch.where(self.kept[:, None], logq, -torch.inf)
        total = logq.logsumexp(-1, keepdim=True)
        return torch.where(total.isneginf(), -torch.inf, logq - total)

    def _frequent(self, counts: Tensor) -> Tensor:
        """Choose the most frequent tokens by counts [b, V]: bool [b, V]."""
        order = counts.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(counts, dtype=torch.bool)
        kept.scatter_(1, order[:, : self.count], True)
        for end in self.ends:
            kept[:, end] = True
        return kept


method(
    "vocab_trim",
    about="drafts with a model, of the most frequent tokens alone",
    sampler="speculative",
    params={"drafter": "model", "draft_vocab": 64},
    paper="2506.22694",
    title="VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding in LLMs",
)
