"""Directed acyclic graphs of B rows, as models of graphs make them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Graph(NamedTuple):
    """Graphs of B rows.

    Attributes:
        transitions: log E, [B, L, L], -inf unless i < j < length of the row.
        emissions: log P, [B, L, V].
        states: states of the vertices, [B, L, D].
        lengths: vertices of every row, long [B]; the last one ends all paths.
    """

    transitions: Tensor
    emissions: Tensor
    states: Tensor
    lengths: Tensor
