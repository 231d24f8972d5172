"""Trained maps of hidden states, in the place of decoder layers, beside or between them.

All begin as what the target does without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

OPEN = 1.0  # bias that routers begin with


class Repair(nn.Module):
    """Map in the place of a decoder layer.

    Args:
        width: channels D.
        rank: channels r in between.
    """

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map hidden states [B, L, D]; what else a decoder layer takes is not read."""
        x = hidden_states
        return x + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class Repairs(nn.Module):
    """Maps of all layers that are left out.

    Args:
        width: channels D.
        rank: rank of the maps.
        skipped: numbers of these layers.
    """

    def __init__(self, width: int, rank: int, skipped: tuple[int, ...]):
        super().__init__()
        self.maps = nn.ModuleDict({str(n): Repair(width, rank) for n in skipped})

    def forward(self, number: int, states: Tensor) -> Tensor:
        """Map the hidden states [B, L, D] of one layer."""
        return self.maps[str(number)](states)


class Routers(nn.Module):
    """Routers of all layers, and maps for closed ones.

    Args:
        width: channels D.
        layers: number of layers.
        rank: rank of the maps; 0 for none.
    """

    def __init__(self, width: int, layers: int, rank: int):
        super().__init__()
        gates = [nn.Linear(width, 1) for _ in range(layers)]
        for gate in gates:
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, OPEN)
        self.gates = nn.ModuleList(gates)
        self.maps = nn.ModuleList(Repair(width, rank) for _ in range(layers if rank else 0))

    def forward(self, number: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's logits [B, L] of a layer's input [B, L, D], and the layer's output
        [B, L, D] if it is closed."""
        gate = self.gates[number]
        logits = gate(states.to(next(gate.parameters()).dtype))[..., 0]
        return logits, self.maps[number](states) if len(self.maps) else states


class Corrections(nn.Module):
    """Low-rank maps of the dropped layers.

    Args:
        width: channels D.
        rank: rank r.
        alpha: the maps are multiplied by alpha / r.
        dropped: numbers of the layers.
    """

    def __init__(self, width: int, rank: int, alpha: float, dropped: tuple[int, ...]):
        super().__init__()
        self.scale = alpha / rank
        self.down = nn.ModuleDict({str(n): nn.Linear(width, rank, bias=False) for n in dropped})
        self.up = nn.ModuleDict({str(n): nn.Linear(rank, width, bias=False) for n in dropped})
        for weight in self.up.parameters():
            nn.init.zeros_(weight)

    def forward(self, number: int, states: Tensor) -> Tensor:
        """Return what is added between full tokens in one layer, for its input [B, L, D]."""
        down, up = self.down[str(number)], self.up[str(number)]
        dtype = next(down.parameters()).dtype
        return (self.scale * up(down(states.to(dtype)))).to(states.dtype)


class TransferMaps(nn.Module):
    """Linear maps from one hidden state to those of the k tokens behind it.

    Args:
        width: channels D.
        depth: number of maps k; all begin as the identity.
    """

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(depth, 1, 1))
        self.bias = nn.Parameter(torch.zeros(depth, width))

    def forward(self, state: Tensor) -> Tensor:
        """Map states [..., D] to [..., k, D]."""
        state = state.to(self.weight.dtype)
        return torch.einsum("...d,ked->...ke", state, self.weight) + self.bias


class LowRank(nn.Module):
    """Addition U D x to a projection; U begins at zero.

    Args:
        base: the projection.
        rank: r.
    """

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Compute U D x, [..., out], of x [..., in]."""
        return x @ self.down.T @ self.up.T
