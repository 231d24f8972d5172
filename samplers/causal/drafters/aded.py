"""ADED: a search over the tri-grams of the text, with a bonus for recent ones.

The weight of a token after the last two is its share among their earlier occurrences in the prompt
and the output, or among those of the last token where the two never stood together, plus
``recency_bonus`` for each of them, up to three, whose tokens are all among the last
``recent_tokens``. The ``kept_tokens`` heaviest tokens stay. The paper searches by Monte Carlo tree
search for the paths with the most probability; the shape ``best_first`` finds exactly those. Its
rule of acceptance changes the distribution, and is replaced by a verifier that does not.

Liu et al., "Adaptive Draft-Verification for Efficient Large Language Model Decoding" (arXiv
2407.12021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gen.core.method import method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import ScopeParams, Table
from gen.samplers.engine.outputs import NONE

MOST_RECENT = 3  # occurrences with a bonus


@dataclass(frozen=True)
class AdedParams(ScopeParams):
    """Parameters of ADED.

    Attributes:
        recent_tokens: last tokens that are recent.
        recency_bonus: weight of a recent occurrence.
        kept_tokens: tokens after a pair that are kept.
    """

    recent_tokens: int = integer(16)
    recency_bonus: float = number(0.04)
    kept_tokens: int = integer(12, least=1)


@method(
    "aded",
    about="searches the tri-grams of prompt and output for the most probable paths",
    sampler="speculative",
    params={
        "drafter": "aded",
        "shape": "best_first",
        "draws": "ranks",
        "verifier": "follow",
        "nodes": 32,
        "tree_depth": 4,
    },
    paper="2407.12021",
    title="Adaptive Draft-Verification for Efficient Large Language Model Decoding",
)
@register("drafter", "aded", params=AdedParams)
class Aded(Table):
    """Searches the tri-grams of prompt and output for the most probable paths."""

    num_tokens = 2

    def weigh(self, tails, parents, depth):
        params, text = self.params, self.text
        lengths = text.matches(tails)
        longest = lengths.amax(-1, keepdim=True)
        counts = ((lengths == longest) & (longest > 0)).to(self.dtype)
        column = torch.arange(lengths.shape[2], device=lengths.device)
        # the first token of the n-gram, and the one that follows the column
        first = column - longest + 1
        is_recent = first >= (text.end - params.recent_tokens)[:, None, None]
        following = F.pad(text.ids[:, 1:], (0, 1), value=NONE)
        ids = following[:, None].expand(lengths.shape)
        recent = self.add_up(ids, counts * is_recent).clamp_max(MOST_RECENT)
        counts = self.add_up(ids, counts)
        weights = counts / counts.sum(-1, keepdim=True).clamp_min(1)
        weights = weights + params.recency_bonus * recent
        top = weights.topk(min(params.kept_tokens, self.size), -1)
        return torch.zeros_like(weights).scatter(-1, top.indices, top.values)
