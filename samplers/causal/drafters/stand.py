"""STAND: drafts from the target's own earlier distributions, averaged by n-gram.

The ``kept_logits`` most probable tokens of every committed position are kept with their
probabilities. At a node, the positions that stood behind the same last tokens count: of the longest
n-gram up to ``max_ngram`` that has any, the ``OCCURRENCES`` latest. Their probabilities are
averaged, and children are drawn without replacement, which is Gumbel-top-k.

Song et al., "Accelerated Test-Time Scaling with Model-Free Speculative Sampling" (arXiv
2506.04708), whose tree is tuned on data; here it is a shape with its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gen.core.lookup import take
from gen.core.method import method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import ScopeParams, Table
from gen.samplers.engine.outputs import NONE
from gen.samplers.engine.rows import RowState

OCCURRENCES = 64  # positions that are averaged at a node


@dataclass(frozen=True)
class StandParams(ScopeParams):
    """Parameters of STAND.

    Attributes:
        max_ngram: last tokens that are looked for at most.
        kept_logits: most probable tokens of a position that are kept.
    """

    max_ngram: int = integer(3, least=1)
    kept_logits: int = integer(10, least=1)


@method(
    "stand",
    about="draws from the averaged distributions behind the same last tokens",
    sampler="speculative",
    params={
        "drafter": "stand",
        "shape": "branching",
        "draws": "without_replacement",
        "verifier": "recursive",
        "branching": "3-2-1-1",
    },
    paper="2506.04708",
    title="Accelerated Test-Time Scaling with Model-Free Speculative Sampling",
)
@register("drafter", "stand", params=StandParams)
class Stand(Table):
    """Draws from the averaged distributions behind the same last tokens."""

    # tokens of every position of the item, long [b, T + 1, k], and their probabilities; the last
    # position takes what is not committed
    tokens = RowState(start=NONE)
    masses = RowState(start=0)

    def __init__(self, target, params):
        super().__init__(target, params)
        self.num_tokens = params.max_ngram
        self.length, self.count = target.length, min(params.kept_logits, self.size)
        shape = target.rows, target.length + 1, self.count
        self.tokens = torch.full(shape, NONE, device=target.device)
        self.masses = torch.zeros(shape, dtype=self.dtype, device=target.device)
        # of finished items, column by column as their texts in ``Context.finished``
        self.kept = [self.tokens[0, :0], self.masses[0, :0]]
        self.before = self.context.outputs.active, self.tokens, self.masses

    def look(self, text):
        items, *before = self.before
        rows = self.rows_left(items)
        width, most = self.context.prompts.shape[1], len(self.context.finished)
        lined_up = []  # with the columns of the text, [b, S, k]
        for n, (own, empty) in enumerate(((self.tokens, NONE), (self.masses, 0))):
            if rows:  # as the context does with their texts
                left = F.pad(before[n][rows, : self.length], (0, 0, 1 + width, 0), value=empty)
                self.kept[n] = torch.cat([self.kept[n], left.flatten(0, 1)])[-most:]
            kept = F.pad(self.kept[n], (0, 0, 0, 1), value=empty).expand(len(own), -1, -1)
            own = F.pad(own[:, : self.length], (0, 0, width, 0), value=empty)
            lined_up.append(torch.cat([kept, own], 1))
        self.entries, self.probs = lined_up
        # whether the column that follows has an entry, [b, 1, S]
        self.has = F.pad(self.entries[:, 1:, 0] != NONE, (0, 1))[:, None]

    def weigh(self, tails, parents, depth):
        lengths = self.text.matches(tails) * self.has
        longest = lengths.amax(-1, keepdim=True)
        column = torch.arange(lengths.shape[2], device=lengths.device)
        order = torch.where((lengths == longest) & (longest > 0), column, -1)
        latest = order.topk(min(OCCURRENCES, len(column)), -1).values  # [b, n, K]
        row = torch.arange(len(lengths), device=lengths.device)[:, None, None]
        entry = (latest + 1).clamp_max(len(column) - 1)
        ids = torch.where(latest[..., None] < 0, NONE, self.entries[row, entry])
        return self.add_up(ids.flatten(2), self.probs[row, entry].flatten(2))

    def observe(self, step, draft, output, verdict):
        super().observe(step, draft, output, verdict)
        if draft is None:
            return
        top = output.logprobs[:, : draft.tokens.shape[1] + 1].topk(self.count, -1)
        ids = torch.where(top.values > -torch.inf, top.indices, NONE)
        masses = top.values.exp().to(self.dtype)
        column = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        if verdict.path is not None:  # the root, then the columns of the path
            column = F.pad(verdict.path + 1, (1, 0))
        depth = torch.arange(column.shape[1], device=ids.device)
        at = step.start[:, None] + depth
        new = (depth <= verdict.num_accepted[:, None]) & (at < self.length)
        at = torch.where(new, at, self.length)[..., None].expand(-1, -1, self.count)
        self.tokens = self.tokens.scatter(1, at, take(ids, column))
        self.masses = self.masses.scatter(1, at, take(masses, column))
        self.before = step.items, self.tokens, self.masses
