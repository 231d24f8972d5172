"""Token recycling: the children of a token are the most probable tokens after its last appearance.

A table holds the ``successors`` most probable tokens after every token, as the target said them
when the token was last in a forward pass: at all nodes of the tree, rejected ones included. The
children of a node with token t are entry t, in its order. A static tree of ranks (shapes
``optimal`` and ``branching``) uses them best.

The table of an item begins empty, or with ``draft_table``, a file with statistics of the target's
own output; with ``scope: call`` it falls back on what finished items left. Before a draft is
verified against its own distribution only ranks are known, so nothing is drawn at random.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (arXiv 2408.08696).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from gen.core.lookup import take
from gen.core.method import method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import ScopeParams, Table
from gen.samplers.engine.draft import RANKS
from gen.samplers.engine.outputs import NONE
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.targets.token_table import TokenTable


@dataclass(frozen=True)
class RecyclingParams(ScopeParams):
    """Parameters of token recycling.

    Attributes:
        successors: tokens that are kept after each token.
    """

    successors: int = integer(8, least=1)


@method(
    "token_recycling",
    about="drafts the most probable tokens after each token's last appearance",
    sampler="speculative",
    params={
        "drafter": "token_recycling",
        "shape": "optimal",
        "draws": "ranks",
        "verifier": "follow",
        "nodes": 80,
        "tree_depth": 6,
    },
    paper="2408.08696",
    title=(
        "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token"
        " Recycling"
    ),
    aliases={"matrix_top_k": "successors"},
)
@register("drafter", "token_recycling", params=RecyclingParams)
class TokenRecycling(Table):
    """Drafts the most probable tokens after each token's last appearance."""

    draws = (RANKS,)

    table = RowState(start=NONE)  # successors of every token, long [b, V + 1, k]; V is no token

    def __init__(self, target, params, table: TokenTable | None = None):
        super().__init__(target, params)
        self.count = min(params.successors, self.size)
        shape, device = (self.size + 1, self.count), target.device
        self.shared = torch.full(shape, NONE, device=device)  # what no item had to learn
        if table is not None:
            kept = table.successors[:, : self.count]
            self.shared[: self.size, : kept.shape[1]] = kept
        self.table = torch.full((target.rows, *shape), NONE, device=device)
        self.before = self.context.outputs.active, self.table  # items and tables of the last step
        self.weights = 0.5 ** torch.arange(self.count, device=device).to(self.dtype)

    @classmethod
    def of(cls, sampler, target, draft):
        table = None if sampler.draft_table is None else target.token_table(sampler.draft_table)
        return cls(target, sampler.params_of("drafter"), table)

    def look(self, text):
        items, tables = self.before
        for row in self.rows_left(items):
            learned = tables[row]
            self.shared = torch.where(learned[:, :1] == NONE, self.shared, learned)

    def weigh(self, tails, parents, depth):
        tokens = tails[..., 0]
        key = torch.where(tokens < 0, self.size, tokens)
        own = take(self.table, key)
        found = torch.where(own[..., :1] == NONE, self.shared[key], own)
        return self.add_up(found, self.weights.expand(found.shape))

    def observe(self, step, draft, output, verdict):
        super().observe(step, draft, output, verdict)
        if draft is None:
            return
        logp = output.logprobs[:, : draft.tokens.shape[1] + 1]
        top = logp.topk(self.count, -1)
        found = torch.where(top.values.isneginf(), NONE, top.indices)
        # behind a draft that the target cannot say there need not be a distribution
        exists = F.pad(draft.exists, (1, 0), value=True) & ~logp.isnan().any(-1)
        tokens = torch.cat([self.tails[:, 0], draft.tokens], 1)
        # of columns with one token the last one counts
        same = (tokens[:, :, None] == tokens[:, None]) & exists[:, None]
        later = torch.ones_like(same[0]).triu(1)
        key = torch.where(exists & (tokens >= 0) & ~(same & later).any(-1), tokens, self.size)
        table = self.table.scatter(1, key[..., None].expand_as(found), found)
        table[:, self.size] = NONE
        self.table = table
        self.before = step.items, table
