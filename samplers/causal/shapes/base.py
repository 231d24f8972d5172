"""Shape of the drafts of a round: which nodes get children, and how many.

``@register("shape", name, params=...)`` on a subclass in one file is all that a new one takes; the
sampler ``speculative`` then accepts ``shape: name``, and the parameters of the shape.

Contract: whether a draft is submitted may depend on the drafts before it and on the distribution
that it is drawn from, never on its own value. A shape that drops random drafts once their values
are known changes the distribution of what is committed; it may drop drafts that are not random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gen.core.params import Params, integer, param
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.draft import (
    POSITION,
    RANKS,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
)
from gen.samplers.engine.rows import RowOwner
from gen.samplers.engine.step_context import CausalStep
from gen.samplers.engine.window import AUTO, LADDER, AutoWidth

MOST_NODES = 1024  # of any tree


@dataclass(frozen=True)
class BudgetParams(Params):
    """Parameters of trees with a budget.

    Attributes:
        nodes: drafts of a round; auto for as many as make the time per token least.
        tree_depth: drafts of a path at most.
    """

    nodes: int | str = param(16, int, 1, also=(AUTO,), each="column")
    tree_depth: int = integer(8, least=1)


class Shape(RowOwner):
    """Shape of the drafts of a round.

    State with one entry per row is declared as ``RowState``.

    Args:
        params: those that the shape was registered with.
        auto: decides the budget of every round (``gen.samplers.engine.window``), by the time of
            rounds of so many positions and the tokens that they committed; None for a budget of
            ``nodes`` drafts.

    Attributes:
        is_chain: whether every node has one child.
        by_level: whether every level is whole before the distributions behind it are asked for.
        has_budget: whether the parameter ``nodes`` says how many drafts a round has.
        parts_models: whether it can draw each path from another draft model.
        needs_weights: whether it reads trained weights (``attach``).
        captures: whether it reads no value on the host (``Drafter.captures``).
        takes: ways to draw siblings (``gen.samplers.engine.draft``) that it can use, its usual one
            first.
    """

    is_chain: ClassVar[bool] = False
    by_level: ClassVar[bool] = True
    has_budget: ClassVar[bool] = False
    parts_models: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    captures: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = (WITHOUT_REPLACEMENT, WITH_REPLACEMENT, RANKS, POSITION)

    def __init__(self, params: Any, auto: AutoWidth | None = None):
        self.params, self.auto = params, auto

    @property
    def budget(self) -> int:
        """Drafts of this round, where the shape ``has_budget``."""
        return self.params.nodes if self.auto is None else self.auto.width - 1

    @classmethod
    def largest(cls, params: Any) -> int:
        """Return the most drafts of a round, whatever the budget."""
        return cls(replace(params, nodes=LADDER[-1] - 1)).nodes

    @property
    def nodes(self) -> int:
        """Most drafts of a round."""
        return self.budget

    def grow(self, builder: TreeBuilder) -> None:
        """Add the drafts of a round to a tree that has only a root."""
        raise NotImplementedError

    def attach(self, sampler: Any, target: Any, draft: Any) -> None:
        """Read what belongs to the models of a call of a sampler; ``draft``: target of the draft
        model, None without one. Raises ``GenError``: trained weights are of other models."""

    def learn(
        self, step: CausalStep, num_accepted: Tensor, num_drafted: Tensor, logp: Tensor
    ) -> None:
        """Learn the outcome of a round: accepted drafts and drafts of each row, long [b], and the
        log-probabilities [b, V] of the target behind the last accepted one. Rows without room wait,
        and learn nothing."""

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Learn how long a step took; see ``LengthPolicy.over``."""
        if self.auto is not None:
            self.auto.observe(width, starts, tokens)
