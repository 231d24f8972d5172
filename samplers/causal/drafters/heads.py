"""Nodes whose distributions heads compute from hidden states of the target's last forward pass.

A head of depth k gives the token k + 1 positions behind the last committed one, from the hidden
state that the last committed token was drawn from. A row that has seen no forward pass has no state
and drafts nothing. Nodes deeper than the heads get no children.

The state of a row is that of the accepted branch alone, so that trees need no second pass, and a
row's drafts depend on no other row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.nets.draft_heads.heads import DraftHeads
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.models.targets.trained_drafters import network_of, unfiltered
from gen.samplers.causal.drafters.base import Nodes
from gen.samplers.engine.causal_loop import CausalStep, Verdict
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.tree import Tree


class HeadNodes(Nodes):
    """Distributions of heads.

    Args:
        target: the model with its items.
        heads: networks of K depths.
        layers: layers of the target whose hidden states the heads read.
    """

    state = RowState()  # states that the last committed tokens come from, [b, S D]
    known = RowState(start=False)  # rows that have one, bool [b]

    def __init__(self, target: CausalTarget, heads: DraftHeads, layers: tuple[str, ...]):
        self.heads, self.hidden_layers = heads, layers
        self.embedding = network_of(target, "a head that drafts").get_input_embeddings()
        self.legal, self.sampling = target.legal, unfiltered(target.sampling)
        width = len(layers) * self.embedding.weight.shape[1]
        self.state = self.embedding.weight.new_zeros(target.rows, width)
        self.known = torch.zeros(target.rows, dtype=torch.bool, device=target.device)

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        row = torch.arange(len(tokens), device=tokens.device)
        last = tokens[row, (step.start - 1).clamp_min(0)]
        # tokens on the way to the root and to each draft, the last committed one first
        self.paths = last[:, None, None]
        return self._logq(step, 0, self.paths)

    def extend(self, step: CausalStep, tree: Tree, first: int) -> Tensor:
        row = torch.arange(len(tree.tokens), device=tree.tokens.device)[:, None]
        ids, depth = tree.tokens[:, first:], tree.depth[:, first:]
        above = self.paths[row, tree.parents[:, first:] + 1]  # [b, n, m]
        length = min(above.shape[-1] + 1, self.heads.depth + 1)
        more = length - above.shape[-1]
        new = F.pad(above, (0, more))
        new.scatter_(-1, depth.clamp_max(length - 1)[..., None], ids[..., None])
        self.paths = torch.cat([F.pad(self.paths, (0, more)), new], 1)
        shape = (*ids.shape, self.legal.shape[-1])
        out = torch.full(shape, -torch.inf, dtype=self.state.dtype, device=ids.device)
        deepest = min(length, self.heads.depth)
        # a chain grows by one depth at a time, and a tree of the loop may stop in the middle of one
        for k in range(first + 1 if tree.is_chain else 1, deepest):
            out = torch.where((depth == k)[..., None], self._logq(step, k, new), out)
        return out

    def _logq(self, step: CausalStep, depth: int, paths: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of one depth behind nodes.

        Args:
            step: context of the step.
            depth: the head.
            paths: tokens on the way to each node, long [b, n, m], m > depth.
        """
        embedded = self.embedding(paths)
        state = self.state[:, None].expand(*paths.shape[:2], -1)
        with torch.no_grad():
            logits = self.heads(depth, state, embedded)[..., : self.legal.shape[-1]]
        at = (step.start + depth).clamp_max(len(self.legal) - 1)[:, None]
        logq = self.sampling(logits, None, legal_at(self.legal, at))
        return torch.where(self.known[:, None, None], logq, -torch.inf)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        assert step.hidden_states is not None, "the target was asked for them"
        states = torch.cat([step.hidden_states[name] for name in self.hidden_layers], -1)
        column = verdict.last_column
        row = torch.arange(len(column), device=column.device)
        self.state = states[row, column.clamp_max(states.shape[1] - 1)].to(self.state.dtype)
        self.known = torch.ones_like(self.known)
