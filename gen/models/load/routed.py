"""Several LoRA adapters on one network: every row of a batch is computed with its own.

    y_b = W x_b + B_n A_n x_b,   n the adapter of row b

The matrices of all adapters are stacked, [N + 1, r, in] and [N + 1, out, r], padded with zeros to
the largest rank; number 0 adds nothing. Which adapter a row has is a tensor, so another choice
changes no shape and compiles nothing anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.models.load.hub import HUB, HubOptions
from gen.models.load.peft_adapters import LowRank, layers_of, read_adapter


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


@torch.no_grad()
def route(network: nn.Module, folders: Mapping[str, str], name: str, hub: HubOptions = HUB) -> None:
    """Put adapters on a network, side by side.

    Args:
        network: the network, whose layers are replaced.
        folders: folder of each adapter by name.
        name: name of the model in messages.
        hub: as of ``read_adapter``.

    Raises:
        GenError: an adapter cannot be read, or does not fit; the network is unchanged.
    """
    read = {key: read_adapter(folder, hub) for key, folder in folders.items()}
    layers: dict[str, nn.Linear] = {}
    for key, folder in folders.items():
        layers |= layers_of(network, read[key], folder, name)
    router = Router(tuple(folders))
    for path, linear in layers.items():
        owner, _, leaf = path.rpartition(".")
        added = [read[key].get(path) for key in folders]
        setattr(network.get_submodule(owner), leaf, RoutedLinear(linear, added, router))


def router_of(network: nn.Module) -> Router | None:
    """Return the router of a network; None where it has no adapters side by side."""
    return next((m.router for m in network.modules() if isinstance(m, RoutedLinear)), None)
