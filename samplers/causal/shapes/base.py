"""Shape of the drafts of a round: which nodes get children, and how many.

``@register("shape", name, params=...)`` on a subclass in one file is all that a new one takes; the
sampler ``speculative`` then accepts ``shape: name``, and the parameters of the shape.

Contract: whether a draft is submitted may depend on the drafts before it and on the distribution
that it is drawn from, never on its own value. A shape that drops random drafts once their values
are known changes the distribution of what is committed; it may drop drafts that are not random.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from gen.samplers.engine.tree import (
    POSITION,
    RANKS,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TreeBuilder,
)

MOST_NODES = 1024  # of any tree


class Shape:
    """Shape of the drafts of a round.

    Attributes:
        is_chain: whether every node has one child.
        by_level: whether every level is whole before the distributions behind it are asked for.
        has_budget: whether the parameter ``nodes`` says how many drafts a round has.
        parts_models: whether it can draw each path from another draft model.
        takes: ways to draw siblings (``gen.samplers.engine.tree``) that it can use, its usual one
            first.
    """

    is_chain: ClassVar[bool] = False
    by_level: ClassVar[bool] = True
    has_budget: ClassVar[bool] = False
    parts_models: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = (WITHOUT_REPLACEMENT, WITH_REPLACEMENT, RANKS, POSITION)

    def __init__(self, params: Any):
        """Take the parameters, those that the shape was registered with."""
        self.params = params

    @property
    def nodes(self) -> int:
        """Most drafts of a round."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Most drafts of a path."""
        raise NotImplementedError

    def grow(self, builder: TreeBuilder) -> None:
        """Add the drafts of a round.

        Args:
            builder: the tree, which has only a root.
        """
        raise NotImplementedError

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Learn how long a step took; see ``LengthPolicy.over``."""
