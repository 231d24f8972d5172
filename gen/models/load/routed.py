"""Several LoRA adapters on one network: every row of a batch is computed with its own.

    y_b = W x_b + B_n A_n x_b,   n the adapter of row b

The matrices of all adapters are stacked, [N + 1, r, in] and [N + 1, out, r], padded with zeros to
the largest rank; number 0 adds nothing. Which adapter a row has is a tensor, so another choice
changes no shape and compiles nothing anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, unknown


@dataclass(frozen=True)
class LowRank:
    """Addition B A to the weight of a linear layer: A [r, in], and B [out, r] with the scale."""

    a: Tensor
    b: Tensor


class Router:
    """Choice of adapters for the rows of a forward pass, shared by all layers of a network.

    Attributes:
        numbers: number of each adapter by name, from 1.
        index: adapter of each row, long [B]; None outside of a forward pass.
    """

    def __init__(self, names: tuple[str, ...]):
        self.numbers = {name: number for number, name in enumerate(names, 1)}
        self.index: Tensor | None = None
        self._lock = threading.RLock()

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; 0 for None. Raises ``GenError`` for an unknown one."""
        if name is None:
            return 0
        if name not in self.numbers:
            raise unknown("adapter", name, self.numbers)
        return self.numbers[name]

    @contextmanager
    def rows(self, index: Tensor) -> Iterator[None]:
        """Compute the forward passes inside with these adapters, one thread at a time.

        Args:
            index: adapter of each row, long [B].
        """
        with self._lock:
            self.index = index
            try:
                yield
            finally:
                self.index = None


class RoutedLinear(nn.Linear):
    """Linear layer with stacked additions, of which every row takes its own."""

    a: Tensor
    b: Tensor

    def __init__(self, linear: nn.Linear, additions: list[LowRank | None], router: Router):
        # the weight stays the layer's own: no second one is made
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.router = linear.weight, linear.bias, router
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        rank = max(len(x.a) for x in additions if x is not None)
        a = torch.zeros(len(additions) + 1, rank, self.in_features, **like)
        b = torch.zeros(len(additions) + 1, self.out_features, rank, **like)
        for number, x in enumerate(additions, 1):
            if x is not None:
                a[number, : len(x.a)], b[number, :, : len(x.a)] = x.a, x.b
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Compute [B, ..., out] of [B, ..., in].

        Raises:
            GenError: the input has not one entry for each row of the batch.
        """
        out, index = F.linear(input, self.weight, self.bias), self.router.index
        if index is None or len(index) != len(input):
            raise GenError(
                f"a layer with adapters got {len(input)} rows and adapters of"
                f" {'no' if index is None else len(index)}; expected one for each: this model"
                " takes one adapter for all rows (adapters: the folder of one)"
            )
        x = input.flatten(1, -2) if input.dim() > 2 else input[:, None]
        added = torch.bmm(torch.bmm(x, self.a[index].mT), self.b[index].mT)
        return out + added.view(out.shape)


def router_of(network: nn.Module) -> Router | None:
    """Return the router of a network; None where it has no adapters side by side."""
    return next((m.router for m in network.modules() if isinstance(m, RoutedLinear)), None)
