"""Kind ``lora_drop``: the model, some of whose layers run at every n-th token alone, with low-rank
corrections in between (drafter ``lora_drop``).

The corrections alone are trained, through all layers behind them and through the full tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import corrections_of, dropping_model
from gen.models.adapters.layer_calls import (
    SequenceCache,
    call_layer,
    decoder_layers,
    drafted_logits,
)
from gen.models.adapters.wrapped_layers import causal_mask
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher


@dataclass(frozen=True)
class DropOptions(Options):
    """Options of the kind.

    Attributes:
        every: layers whose number is a multiple of it run at all tokens.
        cycle: tokens from one that all layers run at to the next.
        rank: rank r of the corrections.
        alpha: they are multiplied by alpha / r.
    """

    every: int = 4
    cycle: int = 4
    rank: int = 8
    alpha: float = 16.0


class LoraDropKind(Kind):
    """Corrections of layers between full tokens. Options: ``DropOptions``."""

    name = "lora_drop"
    is_model = True
    options_type = DropOptions

    def __init__(self, teacher: Teacher, options: DropOptions):
        if options.rank < 1 or options.cycle < 1:
            raise GenError(f"options came as {options}; expected rank and cycle above 0")
        super().__init__(teacher, options)

    def arguments(self) -> dict[str, Any]:
        return {name: vars(self.options)[name] for name in ("every", "cycle", "rank", "alpha")}

    def network(self) -> nn.Module:
        self.teacher.model.model.requires_grad_(False)
        return corrections_of(self.teacher.model, self.arguments())

    def logq(self, net: Net, batch: Batch) -> Tensor:
        model = self.teacher.model
        ids, before = batch.inputs()
        ids = ids[:, :-1]  # nothing is drafted behind the last token
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states = model.embedded(ids, at)
        rotations, mask = model.rotations(states, at), causal_mask(ids.shape[1], states)
        mask = mask.expand(len(ids), -1, -1, -1)
        cache = SequenceCache(batch.prompt_length[:, None] - 1, ids.shape[1])
        for layer in decoder_layers(dropping_model(model, net, self.arguments())):
            states = call_layer(layer, states, at, rotations, mask, cache)
        row = torch.arange(len(ids), device=ids.device)[:, None]
        return self.logprobs(drafted_logits(model, states[row, before]), self.positions(batch))
