"""Shape whose number of drafts is the one that makes the time per token least, ``nodes: auto``.

The shape stays what it is; its budget follows the measured time of a round of so many positions and
the tokens that rounds of that width committed (``gen.samplers.engine.window``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.window import LADDER, AutoWidth


def most_nodes(kind: type[Shape], params: Any) -> int:
    """Return the most drafts of a shape's tree, whatever its budget."""
    return kind(replace(params, nodes=LADDER[-1] - 1)).nodes


class AutoShape(Shape):
    """Shape under a budget that the clock decides.

    Args:
        kind: the shape, which adds as many drafts as its parameter ``nodes`` says.
        params: its parameters.
        auto: number of positions of a round that pays.
    """

    def __init__(self, kind: type[Shape], params: Any, auto: AutoWidth):
        super().__init__(params)
        self.kind, self.auto = kind, auto

    @property
    def nodes(self) -> int:
        return self.auto.width - 1

    @property
    def depth(self) -> int:
        return self._shape().depth

    def _shape(self) -> Shape:
        return self.kind(replace(self.params, nodes=max(self.nodes, 1)))

    def grow(self, builder: TreeBuilder) -> None:
        self._shape().grow(builder)

    def over(self, width, starts, tokens):
        self.auto.observe(width, starts, tokens)
