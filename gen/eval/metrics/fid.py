"""Fréchet Inception distance (FID), with the features of any module.

    FID = |m_r - m_g|^2 + tr(C_r + C_g - 2 (C_r C_g)^(1/2))

Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule (arXiv:1706.08500).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gen.core.registry import register
from gen.eval.frechet import FrechetMetric
from gen.eval.metric import Item
from gen.eval.readers import read_image


@register("metric", "fid")
@dataclass(frozen=True)
class FID(FrechetMetric):
    """Fréchet distance of image features to a reference; lower is better."""

    name, media = "fid", ("image",)

    def read(self, item: Item, model: Any) -> Any:
        return read_image(item.path)
