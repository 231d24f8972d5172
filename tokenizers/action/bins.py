"""Action chunks as uniform bins, one token per step and dimension (RT-2, arXiv 2307.15818; OpenVLA,
arXiv 2406.09246).

B bins have B + 1 edges -1 + 2 k / B and B centres -1 + (2 k + 1) / B, k from 0. A value is encoded
as its bin and decoded as the centre of the bin, with an error of at most 1 / B. Codes grow with the
value, so neighbouring codes are neighbouring actions, as ``distance`` acceptance requires.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.action.base import ActionFrontend, ActionStatistics, at_least


class Bins(ActionFrontend):
    """Base class of tokenizers whose codes are bins of single numbers.

    ``table``: centres of the bins in order, float [bins, 1].
    """

    table: Tensor

    @property
    def grid(self) -> tuple[int, ...]:
        return self.horizon, self.dimensions

    def decode(self, codes: Tensor) -> Tensor:
        return self.table[self.require_codes(codes)[:, 0], 0]

    @property
    def codebooks(self) -> list[Tensor]:
        """Centres of the bins in order, [bins, 1]."""
        return [self.table]

    @property
    def fingerprint(self) -> Tensor:
        return self.digest()


@register("tokenizer", "action_bins")
class ActionBins(Bins):
    """Action tokenizer: codes [B, 1, H, D] of chunks [B, H, D] in [-1, 1].

    Decoding and encoding again gives the same codes. Raises ``GenError`` for bins that ``dtype``
    cannot resolve.
    """

    name, keys = "action_bins", ("bins",)

    def __init__(
        self,
        bins: int,
        horizon: int,
        dimensions: int,
        statistics: ActionStatistics,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__(horizon, dimensions, statistics, device, dtype)
        self.bins = at_least("bins", bins, 2)
        self.config = FrontendConfig("action", "codes", (bins,), (1, 1))
        steps = torch.arange(bins, dtype=torch.float64)
        # single precision at least, so that edges lie between two values of a shorter dtype
        self.inner_edges = (
            (2 * steps[1:] / bins - 1)
            .to(torch.promote_types(self.dtype, torch.float32))
            .to(self.device)
        )
        self.table = ((2 * steps + 1) / bins - 1).to(self.dtype).to(self.device)[:, None]
        if not torch.equal(self._bins_of(self.table[:, 0]), torch.arange(bins, device=self.device)):
            raise GenError(
                f"{bins} bins are too fine for {self.dtype}; expected fewer, or a longer dtype"
            )

    def _bins_of(self, x: Tensor) -> Tensor:
        return torch.bucketize(
            x.to(self.inner_edges.dtype).contiguous(), self.inner_edges, right=True
        )

    def encode(self, x: Tensor) -> Tensor:
        return self._bins_of(self.require_signals(x))[:, None]
