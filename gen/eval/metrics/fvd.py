"""Fréchet video distance (FVD), with the features of any module of clips.

Paper: Unterthiner et al., Towards Accurate Generative Models of Video (arXiv:1812.01717).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gen.core.registry import register
from gen.eval.frechet import FrechetMetric
from gen.eval.metric import Item
from gen.eval.readers import read_clip


@register("metric", "fvd")
@dataclass(frozen=True)
class FVD(FrechetMetric):
    """Fréchet distance of clip features to a reference; lower is better."""

    name, media = "fvd", ("video",)

    def read(self, item: Item, model: Any) -> Any:
        return read_clip(item.path)
