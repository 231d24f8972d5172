"""Draft vocabulary: only the most frequent tokens may be drafted, with any source of drafts.

The distribution that drafts are drawn from is that of the source without the other tokens,
renormalised; the eos token always stays. What is committed follows the target all the same. Which
tokens are frequent says a table of the target's own output, or the item's own text. A draft model
still computes all its logits here, so that the gain is in acceptance alone.

Goel et al., "VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding in LLMs" (arXiv
2506.22694); Zhao et al., "FR-Spec" (arXiv 2502.14856).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError
from gen.core.method import method
from gen.models.adapters.base import ModelAdapter
from gen.models.load.digest import digest_of
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.tables import Context
from gen.samplers.engine.outputs import NONE
from gen.samplers.engine.step_context import CausalStep


@dataclass
class TokenTable:
    """Statistics of the tokens that a model generates.

    Attributes:
        counts: how often each token came, long [V].
        successors: tokens that follow each one most often, in their order, -1 behind the last,
            long [V, k].
    """

    counts: Tensor
    successors: Tensor


def write_table(path: Path, table: TokenTable, model: torch.nn.Module) -> None:
    """Write the statistics of a model's tokens, with the model's digest."""
    tensors = {"counts": table.counts, "successors": table.successors}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"model": digest_of(model)})


def read_table(path: str, target: CausalTarget) -> TokenTable:
    """Read the statistics of the tokens of a target's model.

    Raises:
        GenError: the file cannot be read, or is of another vocabulary or model.
    """
    try:
        with safe_open(path, "pt") as file:
            found = TokenTable(file.get_tensor("counts"), file.get_tensor("successors"))
            model = (file.metadata() or {}).get("model")
    except (OSError, SafetensorError) as error:
        raise GenError(f"sampler.draft_table {path} cannot be read: {error}") from None
    size = target.legal.shape[-1]
    if len(found.counts) != size or len(found.successors) != size:
        raise GenError(
            f"sampler.draft_table {path} is of {len(found.counts)} tokens; expected {size}, those"
            " of the model"
        )
    assert isinstance(target.model, ModelAdapter)
    here = digest_of(target.model.model)
    if model != here:
        raise GenError(
            f"sampler.draft_table {path} was made with another model, {model}; expected {here}"
            f" ({target.name or 'the model'})"
        )
    device = target.device
    return TokenTable(found.counts.to(device), found.successors.to(device))


class DraftVocab:
    """Tokens that may be drafted.

    Args:
        target: the model with its items.
        count: tokens that stay.
        table: statistics of the model's tokens; None to count in each row's own text.
    """

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
