"""Adapter of the built-in DA-Transformers (``gen.models.nets.dag``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.nets.dag import DagModel
from gen.models.nets.lattice import Graph


class DagLM(ModelAdapter):
    """DA-Transformer; see ``LatticeModel``. Its last token, unk, is an input and never emitted."""

    model: DagModel

    def __init__(self, model: DagModel):
        self.model, self.vocab_size = model.eval(), model.config.vocab_size + 1

    @torch.no_grad()
    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        """Compute the graphs of sources; see ``LatticeModel``.

        Raises:
            GenError: a source that is longer than the model takes.
        """
        longest, most = int(lengths.max()), self.model.config.max_source
        if longest > most:
            raise GenError(
                f"a source has {longest} words, bos and eos included; expected at most {most}"
            )
        graph = self.model(source[:, :longest], lengths)
        return graph._replace(emissions=F.pad(graph.emissions, (0, 1), value=-torch.inf))
