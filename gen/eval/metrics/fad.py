"""Fréchet audio distance (FAD), with the features of any module of waves.

Paper: Kilgour et al., Fréchet Audio Distance (arXiv:1812.08466).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gen.core.errors import bad_value
from gen.core.params import integer
from gen.core.registry import register
from gen.eval.features import Features
from gen.eval.frechet import FrechetMetric
from gen.eval.metric import Item
from gen.eval.readers import read_wave


@register("metric", "fad")
@dataclass(frozen=True)
class FAD(FrechetMetric):
    """Fréchet distance of audio features to a reference; lower is better. ``rate``: samples per
    second that the module takes; 0 for the rate of a checkpoint, else of the files."""

    rate: int = integer(0)

    name, media = "fad", ("audio",)

    def open(self, device: torch.device) -> Features:
        module = super().open(device)
        if self.rate and module.rate not in (None, self.rate):
            raise bad_value("fad.rate", self.rate, f"{module.rate}, the rate of {self.features}")
        return module

    def read(self, item: Item, model: Any) -> Any:
        return torch.from_numpy(read_wave(item.path, self.rate or model.rate)[0])
