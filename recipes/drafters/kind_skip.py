"""Kind ``skip``: the model with low-rank maps in the place of some layers (drafter ``skip``).

The layers that are kept, and norm and head behind them, stay as they are: the maps alone are
trained, through all layers behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import repairs_of
from gen.models.adapters.layer_calls import call_layer, decoder_layers, drafted_logits
from gen.models.adapters.layer_plans import kept_layers
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher


@dataclass(frozen=True)
class SkipOptions(Options):
    """Options of the kind.

    Attributes:
        kept_layers: share of the layers, or the numbers of the layers that are kept.
        rank: rank of the maps.
    """

    kept_layers: str = "1/2"
    rank: int = 16


class SkipRepair(Kind):
    """Maps in the place of layers. Options: ``SkipOptions``."""

    name = "skip"
    is_model = True
    options_type = SkipOptions

    def __init__(self, teacher: Teacher, options: SkipOptions):
        if options.rank < 1:
            raise GenError(f"rank came as {options.rank}; expected a number above 0")
        super().__init__(teacher, options)
        self.kept = kept_layers(options.kept_layers, teacher.model.num_layers)
        if len(self.kept) == teacher.model.num_layers:
            raise GenError(
                f"kept_layers came as {options.kept_layers!r}, all layers of the model; expected"
                " a plan that leaves one out"
            )

    def arguments(self) -> dict[str, Any]:
        kept = ",".join(map(str, self.kept))
        return {"kept_layers": kept, "rank": self.options.rank}

    def network(self) -> nn.Module:
        self.teacher.model.model.requires_grad_(False)
        return repairs_of(self.teacher.model, self.arguments())

    def logq(self, net: Net, batch: Batch) -> Tensor:
        model = self.teacher.model
        ids, before = batch.inputs()
        ids = ids[:, :-1]  # nothing is drafted behind the last token
        at = torch.arange(ids.shape[1], device=ids.device)[None]
        states = model.embedded(ids, at.expand_as(ids))
        rotations = model.rotations(states, at)
        for number, layer in enumerate(decoder_layers(model)):
            if number in self.kept:
                states = call_layer(layer, states, at, rotations)
            else:
                states = net(number, states)
        row = torch.arange(len(ids), device=ids.device)[:, None]
        logits = drafted_logits(model, states[row, before])
        return self.logprobs(logits, self.positions(batch))
