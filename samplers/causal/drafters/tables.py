"""Drafters without a model: tables of tokens that follow other tokens.

A table gives every node of a tree of drafts a weight per token, from the text before it: prompt and
committed tokens of the row, and the drafts on the way to the node. The weights of tokens that may
stand at the node's position, normalised, are the distribution that drafts are drawn from. Where no
token has a weight the table knows nothing, and the node gets no children.

What a table learns belongs to its item (``scope: item``): no other item changes anything. With
``scope: call`` it also keeps what finished items taught it. How many drafts are accepted then
depends on which items were finished before, so that only verifiers whose tokens do not depend on
the drafts take it.

Everything here is tensors on the target's device, so that no step waits for a copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.lookup import legal_at, take
from gen.core.params import Params, Rule, choice
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.engine.host import to_device
from gen.samplers.engine.outputs import CALL, ITEM, NONE, Outputs

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Draft, Verdict
    from gen.samplers.engine.step_context import CausalStep

MOST_FINISHED = 1 << 14  # tokens of finished items that are kept


@dataclass
class Text:
    """Tokens that stand before the next position, row by row.

    Attributes:
        ids: texts of finished items, then prompt and output of the row, ``NONE`` between and behind
            them, long [b, S].
        end: column behind the last committed token, long [b].
        own: first column of the row's own text.
    """

    ids: Tensor
    end: Tensor
    own: int

    def last(self, count: int) -> Tensor:
        """Return the last ``count`` tokens, the latest one last, long [b, count]."""
        at = self.end[:, None] - torch.arange(count, 0, -1, device=self.ids.device)
        return torch.where(at < self.own, NONE, self.ids.gather(1, at.clamp_min(0)))

    def next(self, at: Tensor) -> Tensor:
        """Return the tokens in columns [b, ...], ``NONE`` beyond the last one."""
        flat, most = at.flatten(1), self.ids.shape[1] - 1
        ids = self.ids.gather(1, flat.clamp(0, most))
        return torch.where((flat >= 0) & (flat <= most), ids, NONE).view(at.shape)

    def matches(self, tails: Tensor) -> Tensor:
        """Count the tokens up to each column that are the last ones of some tails, tokens long [b,
        n, N], the latest one last: lengths between 0 and N, long [b, n, S]; 0 where no known token
        follows the column."""
        size = self.ids.shape[1]
        follows = F.pad(self.ids[:, 1:], (0, 1), value=NONE) >= 0
        alive = follows[:, None].expand(-1, tails.shape[1], -1)
        length = torch.zeros_like(alive, dtype=torch.long)
        for back in range(tails.shape[2]):
            one = tails[:, :, tails.shape[2] - 1 - back, None]
            before = F.pad(self.ids, (back, 0), value=NONE)[:, None, :size]
            alive = alive & (before == one) & (one >= 0)
            length = length + alive
        return length


def prompt_tokens(target: CausalTarget) -> Tensor:
    """Return the prompts of all items as tokens of the output, right-aligned, long [N, P].

    ``TokenSpace.prompt_tokens`` says which token an id of a prompt stands for. Without it an id is
    a token if it may come anywhere. Other ids are ``NONE``.
    """
    prompts, count = target.prompts, target.items
    ids, lengths = prompts.all_tokens[:count], prompts.all_lengths[:count]
    table = target.space.prompt_tokens
    if table is None:
        every = torch.arange(target.legal.shape[-1], device=ids.device)
        table = torch.where(target.legal.any(0), every, NONE)
    table = F.pad(table.to(ids.device), (0, 1), value=NONE)
    known = table[ids.clamp(0, len(table) - 1)]
    width = ids.shape[1]
    at = torch.arange(width, device=ids.device) - (width - lengths[:, None])
    tokens = known.gather(1, at.clamp_min(0))
    return torch.where((at < 0) | (tokens >= target.legal.shape[-1]), NONE, tokens)


class Context:
    """Texts of a call: prompt and output of every row, and of finished items where it ``keeps``
    them."""

    def __init__(self, target: CausalTarget, keeps: bool = False):
        self.target, self.keeps = target, keeps
        self._prompts, self._version = prompt_tokens(target), target.prompts.version
        self.outputs = Outputs(target)
        self.finished = self.prompts[0, :0]  # texts of finished items, one after the other

    @property
    def prompts(self) -> Tensor:
        """Prompts of all items as tokens of the output, right-aligned, long [N, P]."""
        if self._version != self.target.prompts.version:  # items were given prompts since
            self._prompts, self._version = prompt_tokens(self.target), self.target.prompts.version
        return self._prompts

    @property
    def width(self) -> int:
        """Columns of one item's text, with the ``NONE`` before it."""
        return 1 + self.prompts.shape[1] + self.outputs.tokens.shape[1]

    def read(self, step: CausalStep, tokens: Tensor) -> Text:
        """Return the texts of the rows, whose committed tokens are long [b, T]."""
        if self.keeps and len(left := self.outputs.begin(step)):
            # texts of the items that have left the batch, in their order
            items = to_device(left, self.prompts.device)
            text = torch.cat([self.prompts[items], self.outputs.tokens[items]], 1)
            text = F.pad(text, (1, 0), value=NONE).flatten()
            whole = MOST_FINISHED // self.width * self.width
            self.finished = torch.cat([self.finished, text])[-whole:]
        column = torch.arange(tokens.shape[1], device=tokens.device)
        output = torch.where(column < step.start[:, None], tokens, NONE)
        before = F.pad(self.finished, (0, 1), value=NONE).expand(len(output), -1)
        prompts, first = self.prompts[step.rows], before.shape[1]
        ids = torch.cat([before, prompts, output], 1)
        return Text(ids, step.start + first + prompts.shape[1], first)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        """Note what a step commits."""
        if self.keeps:
            self.outputs.accept(step, verdict)


@dataclass(frozen=True)
class ScopeParams(Params):
    """Parameters of tables that learn.

    Attributes:
        scope: item to learn from the item alone, or call to learn from the call's finished items
            too, which takes a verifier whose tokens do not depend on the drafts.
    """

    scope: str = choice(ITEM, (ITEM, CALL))


class Table(DraftSource):
    """Distributions that come from a table of tokens.

    Attributes:
        num_tokens: last tokens before a node that its weights depend on.
        text: texts of the rows, as they are in this step.
    """

    num_tokens: int = 1
    rules = (
        Rule(
            "scope",
            lambda s: (
                s.scope == ITEM
                or s.parts.verifier.guarantee == "same_tokens"
                or not isinstance(s.params_of("drafter"), ScopeParams)
            ),
            "item with sampler.verifier {verifier}, or the verifier follow, whose tokens do not"
            " depend on which items were finished before",
        ),
    )

    def __init__(self, target: CausalTarget, params: Any):
        self.params = params
        self.context = Context(target, isinstance(params, ScopeParams) and params.scope == CALL)
        self.captures = not self.context.keeps
        self.legal, self.size = target.legal, target.legal.shape[-1]
        exact = target.model.dtype == torch.float64
        self.dtype = torch.float64 if exact else torch.float32

    @classmethod
    def of(cls, sampler: Any, target: CausalTarget, draft: Any) -> Table:
        return cls(target, sampler.params_of("drafter"))

    def look(self, text: Text) -> None:
        """Look up what the nodes of a step have in common."""

    def weigh(self, tails: Tensor, parents: Tensor, depth: Tensor) -> Tensor:
        """Weigh the tokens after nodes, [b, n, V], at least 0. ``tails``: last tokens on the way to
        each node, the latest one last, long [b, n, N]; ``parents``: columns of their parents, -2
        for the root's, long [b, n]; ``depth``: drafts on the way, long [b, n]."""
        raise NotImplementedError

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        self.text = self.context.read(step, tokens)
        self.look(self.text)
        # last tokens at the root and at the drafts, long [b, 1 + n, N]
        self.tails = self.text.last(self.num_tokens)[:, None]
        depth = torch.zeros_like(step.start)[:, None]
        return self._logq(step, self.weigh(self.tails, depth - 2, depth), depth)

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        parents, depth = tree.parents[:, first:], tree.depth[:, first:]
        above = take(self.tails, parents + 1)
        tails = torch.cat([above[..., 1:], tree.tokens[:, first:, None]], -1)
        self.tails = torch.cat([self.tails, tails], 1)
        return self._logq(step, self.weigh(tails, parents, depth), depth)

    def observe(self, step, draft, output, verdict):
        self.context.accept(step, verdict)

    def rows_left(self, items: np.ndarray) -> list[int]:
        """List the rows of items that have left the batch, in their order, among those of the last
        step, int64 [b]; none with ``scope: item``."""
        return [int((items == item).argmax()) for item in self.context.outputs.left.tolist()]

    def _logq(self, step: CausalStep, weights: Tensor, depth: Tensor) -> Tensor:
        """Normalise the weights [b, n, V], which are written over, of the tokens that may stand at
        ``depth`` [b, n]."""
        at = (step.start[:, None] + depth).clamp_max(len(self.legal) - 1)
        total = weights.mul_(legal_at(self.legal, at)).sum(-1, keepdim=True)
        return weights.div_(torch.where(total > 0, total, 1)).log_()

    def add_up(self, ids: Tensor, values: Tensor) -> Tensor:
        """Add values [..., K] up by their tokens [..., K]: weights [..., V]."""
        out = values.new_zeros(*ids.shape[:-1], self.size + 1, dtype=self.dtype)
        ids = torch.where(ids < 0, self.size, ids)
        return out.scatter_add_(-1, ids, values.to(self.dtype))[..., : self.size]
