"""Drafters without a model: tables of tokens that follow other tokens.

A table gives every node of the tree a weight per token. The weights of tokens that may stand at
the node's position, normalised, are the distribution that drafts are drawn from. Where no token has
a weight the table knows nothing, and the node gets no children.

What a table learns belongs to its item (``scope: item``): no other item changes anything. With
``scope: call`` it also keeps what finished items taught it. How many drafts are accepted then
depends on which items were finished before, so that only verifiers whose tokens do not depend on
the drafts take it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.params import Params, choice
from gen.core.registry import registry
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import DraftSource, Nodes, part_params
from gen.samplers.causal.drafters.context import Context, Text, tails_after
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.outputs import CALL, ITEM
from gen.samplers.engine.step_context import CausalStep


@dataclass(frozen=True)
class ScopeParams(Params):
    """Parameters of tables that learn.

    Attributes:
        scope: item to learn from the item alone, or call to learn from the call's finished items
            too, which takes a verifier whose tokens do not depend on the drafts.
    """

    scope: str = choice(ITEM, (ITEM, CALL))


class TableNodes(Nodes):
    """Nodes whose distributions come from a table.

    Args:
        target: the model with its items.
        scope: item or call.
    """

    def __init__(self, target: CausalTarget, scope: str = ITEM):
        self.context = Context(target, scope == CALL)
        self.legal, self.size = target.legal, target.legal.shape[-1]
        exact = target.model.dtype == torch.float64
        self.dtype = torch.float64 if exact else torch.float32

    def weigh_root(self, step: CausalStep, text: Text) -> Tensor:
        """Return the weights [b, V] of the token after the last committed one."""
        raise NotImplementedError

    def weigh(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        """Return the weights [b, n, V] of the tokens after the last n columns of a tree."""
        raise NotImplementedError

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        self.text = self.context.read(step, tokens)
        weights = self.weigh_root(step, self.text)[:, None]
        return self._logq(step, weights, torch.zeros_like(step.start)[:, None])

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        weights = self.weigh(step, tree, first)
        return self._logq(step, weights, tree.depth[:, first:])

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        self.context.accept(step, verdict)

    def _logq(self, step: CausalStep, weights: Tensor, depth: Tensor) -> Tensor:
        """Normalise the weights [b, n, V] of the tokens that may stand at ``depth`` [b, n]."""
        at = (step.start[:, None] + depth).clamp_max(len(self.legal) - 1)
        weights = weights * legal_at(self.legal, at)
        total = weights.sum(-1, keepdim=True)
        return torch.where(total > 0, weights / total, 0).log()

    def one_hot(self, ids: Tensor) -> Tensor:
        """Return weights [..., V] of 1 at some tokens [...], none where a token is ``NONE``."""
        return self.add_up(ids[..., None], torch.ones_like(ids, dtype=self.dtype)[..., None])

    def add_up(self, ids: Tensor, values: Tensor) -> Tensor:
        """Add values [..., K] up by their tokens [..., K]: weights [..., V]."""
        out = values.new_zeros(*ids.shape[:-1], self.size + 1, dtype=self.dtype)
        ids = torch.where(ids < 0, self.size, ids)
        return out.scatter_add_(-1, ids, values.to(self.dtype))[..., : self.size]


class TailNodes(TableNodes):
    """Nodes whose distribution depends on the last ``num_tokens`` tokens before them."""

    num_tokens: int

    def weigh_tails(self, text: Text, tails: Tensor) -> Tensor:
        """Return the weights [b, n, V] of the tokens after some tails, long [b, n, N]."""
        raise NotImplementedError

    def weigh_root(self, step: CausalStep, text: Text) -> Tensor:
        self.tails = text.last(self.num_tokens)[:, None]
        return self.weigh_tails(text, self.tails)[:, 0]

    def weigh(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        new = tails_after(self.tails, tree.parents[:, first:], tree.tokens[:, first:])
        self.tails = torch.cat([self.tails, new], 1)
        return self.weigh_tails(self.text, new)


class TableSource(DraftSource):
    """Source of a table's nodes.

    Attributes:
        nodes_type: class of the nodes, made of the target and of the drafter's parameters.
    """

    nodes_type: ClassVar[Callable[[CausalTarget, Any], Nodes]]

    @classmethod
    def nodes(cls, sampler: Any, target: CausalTarget, draft: Any) -> Nodes:
        return cls.nodes_type(target, part_params(sampler, "drafter", sampler.drafter))

    @classmethod
    def check(cls, sampler: Any) -> None:
        scoped = registry.params_of("drafter", sampler.drafter)
        scoped = scoped is not None and issubclass(scoped, ScopeParams)
        if not scoped or sampler.scope == ITEM:
            return
        if registry.get("verifier", sampler.verifier).guarantee != "same_tokens":
            raise bad_value(
                "sampler.scope",
                sampler.scope,
                f"item with sampler.verifier {sampler.verifier}, or the verifier follow, whose"
                " tokens do not depend on which items were finished before",
            )
