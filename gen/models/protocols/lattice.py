"""All positions in one forward pass, as paths of a directed acyclic graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.lattice import graph_adapter
from gen.models.targets.lattice import graph_target


@register("protocol", "lattice")
class Lattice(ModelProtocol):
    """Transitions and emissions of the vertices of a graph, given a source."""

    targets = {"codes": graph_target}
    adapters = {"codes": graph_adapter}
    replaces_rows = guides = False
    closed_form = "Lattice"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return "vertices_per_word" in config
