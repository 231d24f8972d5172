"""Network that finds points in an image by spatial soft-argmax (Finn et al., arXiv 1509.06113).

Convolutions make one map per point; the softmax of a map over all cells is a distribution of the
point's location, and its mean is the estimate:

    p_k = sum_ij softmax(map_k)_ij (x_j, y_i)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Keypoints(nn.Module):
    """Convolutional network with one map per point.

    Args:
        points: number of points.
        width: channels of the hidden layers.
    """

    def __init__(self, points: int, width: int = 24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(width, width, 5, padding=2),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.GELU(),
            nn.Conv2d(width, points, 1),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Find the points of images.

        Args:
            pixels: float [B, 3, H, W] in [0, 1].

        Returns:
            Points [B, K, 2]: x from left to right and y from bottom to top, in [0, 1].
        """
        maps = self.layers(pixels)
        rows, columns = maps.shape[2:]
        weights = maps.flatten(2).softmax(-1).view_as(maps)
        x = (torch.arange(columns, device=maps.device) + 0.5) / columns
        y = 1 - (torch.arange(rows, device=maps.device) + 0.5) / rows
        return torch.stack([(weights.sum(2) * x).sum(-1), (weights.sum(3) * y).sum(-1)], -1)
