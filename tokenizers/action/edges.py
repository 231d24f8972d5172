"""Action chunks in OpenVLA's bins (Kim et al., arXiv 2406.09246): E edges from -1 to 1, and E - 1
centres between them.

    code k = (number of edges <= x) - 1       centre of k = (edge k + edge k+1) / 2, of the last
                                              code that of the code before it

The last code stands for x = 1 alone, so E codes stand for E - 1 values. A dimension that OpenVLA
does not normalise has the statistics -1 and 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.registry import register
from gen.tokenizers.action.base import ActionStatistics, at_least
from gen.tokenizers.action.bins import Bins


@register("tokenizer", "action_edges")
class ActionEdges(Bins):
    """Action tokenizer: codes [B, 1, H, D] of chunks [B, H, D] in [-1, 1].

    It always works in double precision: shorter dtypes cannot resolve 256 bins.
    """

    name, keys = "action_edges", ("edges",)

    def __init__(
        self,
        edges: int,
        horizon: int,
        dimensions: int,
        statistics: ActionStatistics,
        device="cpu",
        dtype=torch.float64,
    ):
        super().__init__(horizon, dimensions, statistics, device, torch.float64)
        self.edges = at_least("edges", edges, 2)
        self.config = FrontendConfig("action", "codes", (edges,), (1, 1))
        self.bounds = torch.linspace(-1, 1, edges, dtype=torch.float64, device=self.device)
        centres = (self.bounds[:-1] + self.bounds[1:]) / 2
        self.table = torch.cat([centres, centres[-1:]])[:, None]

    def encode(self, x: Tensor) -> Tensor:
        return (
            torch.bucketize(self.require_signals(x).double().contiguous(), self.bounds, right=True)[
                :, None
            ]
            - 1
        )
