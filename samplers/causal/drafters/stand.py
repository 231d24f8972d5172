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
from torch import Tensor

from gen.core.method import method
from gen.core.params import integer
from gen.core.registry import register
from gen.models.targets.base import StepOutput
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.context import NONE, Text
from gen.samplers.causal.drafters.tables import CALL, ScopeParams, TableSource, TailNodes
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.step_context import CausalStep

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


class StandNodes(TailNodes):
    """Nodes with the averaged distributions of positions behind the same last tokens."""

    # tokens of every position of the item, long [b, T + 1, k], and their probabilities; the last
    # position takes what is not committed
    tokens = RowState(start=NONE)
    masses = RowState(start=0)

    def __init__(self, target: CausalTarget, params: StandParams):
        super().__init__(target, params.scope)
        self.scope, self.num_tokens = params.scope, params.max_ngram
        self.length, self.count = target.length, min(params.kept_logits, self.size)
        shape = target.rows, target.length + 1, self.count
        self.tokens = torch.full(shape, NONE, device=target.device)
        self.masses = torch.zeros(shape, dtype=self.dtype, device=target.device)
        # of finished items, column by column as their texts in ``Context.finished``
        self.kept = self.tokens[0, :0], self.masses[0, :0]
        self.before = self.context.outputs.active, self.tokens, self.masses
        self.top: tuple[Tensor, Tensor] | None = None

    def weigh_root(self, step: CausalStep, text: Text) -> Tensor:
        self._keep_finished()
        width, b = self.context.prompts.shape[1], len(text.ids)

        def by_column(finished: Tensor, own: Tensor, empty: int) -> Tensor:
            """Line entries up with the columns of the text, [b, S, k]."""
            before = F.pad(finished, (0, 0, 0, 1), value=empty).expand(b, -1, -1)
            own = F.pad(own[:, : self.length], (0, 0, width, 0), value=empty)
            return torch.cat([before, own], 1)

        self.entries = by_column(self.kept[0], self.tokens, NONE)
        self.probs = by_column(self.kept[1], self.masses, 0)
        return super().weigh_root(step, text)

    def weigh_tails(self, text: Text, tails: Tensor) -> Tensor:
        has = F.pad((self.entries[..., 0] != NONE)[:, 1:], (0, 1))  # of the column that follows
        lengths = text.matches(tails) * has[:, None]
        longest = lengths.amax(-1, keepdim=True)
        column = torch.arange(lengths.shape[2], device=lengths.device)
        order = torch.where((lengths == longest) & (longest > 0), column, -1)
        latest = order.topk(min(OCCURRENCES, len(column)), -1).values  # [b, n, K]
        row = torch.arange(len(lengths), device=lengths.device)[:, None, None]
        entry = (latest + 1).clamp_max(len(column) - 1)
        ids = torch.where(latest[..., None] < 0, NONE, self.entries[row, entry])
        return self.add_up(ids.flatten(2), self.probs[row, entry].flatten(2))

    def learn(self, step: CausalStep, tree: Draft, output: StepOutput) -> None:
        top = output.logprobs[:, : tree.tokens.shape[1] + 1].topk(self.count, -1)
        self.top = torch.where(top.values > -torch.inf, top.indices, NONE), top.values.exp()

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        super().accept(step, verdict)
        if self.top is None:
            return
        (ids, masses), self.top = self.top, None
        column = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        if verdict.path is not None:  # the root, then the columns of the path
            column = F.pad(verdict.path + 1, (1, 0))
        depth = torch.arange(column.shape[1], device=ids.device)
        at = step.start[:, None] + depth
        new = (depth <= verdict.num_accepted[:, None]) & (at < self.length)
        at = torch.where(new, at, self.length)[..., None].expand(-1, -1, self.count)
        row = torch.arange(len(ids), device=ids.device)[:, None]
        self.tokens = self.tokens.scatter(1, at, ids[row, column])
        self.masses = self.masses.scatter(1, at, masses[row, column].to(self.dtype))
        self.before = step.items, self.tokens, self.masses

    def _keep_finished(self) -> None:
        """Append the entries of the items that have left the batch, as the context its texts."""
        if self.scope != CALL or not len(self.context.outputs.left):
            return
        items, tokens, masses = self.before
        rows = [int((items == item).argmax()) for item in self.context.outputs.left.tolist()]
        first = 1 + self.context.prompts.shape[1]
        most = len(self.context.finished)

        def joined(kept: Tensor, x: Tensor, empty: int) -> Tensor:
            new = F.pad(x[rows, : self.length], (0, 0, first, 0), value=empty).flatten(0, 1)
            return torch.cat([kept, new])[-most:]

        self.kept = joined(self.kept[0], tokens, NONE), joined(self.kept[1], masses, 0)


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
class Stand(TableSource):
    """Draws from the averaged distributions behind the same last tokens."""

    nodes_type = StandNodes
