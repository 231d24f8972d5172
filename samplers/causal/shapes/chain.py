"""One draft after the other: each round drafts ``num_speculative_tokens`` tokens."""

from __future__ import annotations

from gen.core.registry import register
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.engine.tree import TreeBuilder


@register("shape", "chain")
class Chain(Shape):
    """Drafts that follow each other. Parameter: ``num_speculative_tokens``."""

    is_chain = True

    def __init__(self, params: object, length: int = 5):
        super().__init__(params)
        self.length = length

    @property
    def nodes(self) -> int:
        return self.length

    @property
    def depth(self) -> int:
        return self.length

    def grow(self, builder: TreeBuilder) -> None:
        for column in range(min(self.length, builder.most_depth)):
            builder.expand()
            builder.add(builder.columns([column - 1]))
