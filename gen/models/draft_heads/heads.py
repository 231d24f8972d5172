"""Heads that draft from hidden states of a model: one for each depth of the draft.

The state is that of the position that the last committed token was drawn from. The head of depth k
gives the token at depth k behind that token: depth 0 is its direct successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.models.draft_heads.trunks import ENTRY_TRUNKS, ChimeraLayer, CloverLayer


class DraftHeads(Protocol):
    """Heads of K depths.

    Attributes:
        depth: number of heads K.
    """

    depth: int

    def __call__(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the logits [..., V] of one depth.

        Args:
            depth: the head, below K.
            state: hidden states, [..., D] or of several layers [..., S D].
            embedded: embeddings of the last committed token and the drafts on the way, [..., n, D]
                with n > depth; later ones are not read.
        """
        ...


class MedusaHeads(nn.Module):
    """Medusa heads: x + SiLU(W x), then a projection to the vocabulary; they read no draft.

    Cai et al., "Medusa" (arXiv 2401.10774). W begins at 0, so that a head begins as the target's.

    Args:
        head: projection of the target, [V, D].
        depth: number of heads K.
    """

    def __init__(self, head: Tensor, depth: int):
        super().__init__()
        self.depth, (size, width) = depth, head.shape
        blocks = [nn.Linear(width, width) for _ in range(depth)]
        projections = [nn.Linear(width, size, bias=False) for _ in range(depth)]
        self.blocks, self.projections = nn.ModuleList(blocks), nn.ModuleList(projections)
        for block, projection in zip(blocks, projections, strict=True):
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
            projection.weight.data.copy_(head.detach())

    def forward(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """See ``DraftHeads``."""
        block, projection = _linear(self.blocks, depth), _linear(self.projections, depth)
        x = state.to(projection.weight.dtype)
        return projection(x + F.silu(block(x)))


class HydraHeads(nn.Module):
    """Hydra heads: each reads the drafts on the way as well; the target's projection is shared.

    Ankner et al., "Hydra" (arXiv 2402.05109). A head is a linear map of state and embeddings plus
    SiLU of another one, then x + SiLU(W x). All of it begins at the state.

    Args:
        head: projection of the target, [V, D]; it is no parameter.
        depth: number of heads K.
        states: number of layers S whose states are read; the last one is the last norm's.
    """

    head: Tensor

    def __init__(self, head: Tensor, depth: int, states: int = 1):
        super().__init__()
        self.depth, self.width = depth, head.shape[1]
        self.register_buffer("head", head.detach().clone(), persistent=False)
        sizes = [(states + k + 1) * self.width for k in range(depth)]
        skips = [nn.Linear(n, self.width, bias=False) for n in sizes]
        gates = [nn.Linear(n, self.width) for n in sizes]
        blocks = [nn.Linear(self.width, self.width) for _ in sizes]
        self.skips, self.gates = nn.ModuleList(skips), nn.ModuleList(gates)
        self.blocks = nn.ModuleList(blocks)
        for part in (*skips, *gates, *blocks):
            nn.init.zeros_(part.weight)
        for part in (*gates, *blocks):
            nn.init.zeros_(part.bias)
        for skip in skips:
            last = slice((states - 1) * self.width, states * self.width)
            skip.weight.data[:, last] = torch.eye(self.width)

    def forward(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """See ``DraftHeads``."""
        weight = _linear(self.skips, depth).weight
        given = torch.cat([state, embedded[..., : depth + 1, :].flatten(-2)], -1).to(weight.dtype)
        x = self.skips[depth](given) + F.silu(self.gates[depth](given))
        x = x + F.silu(self.blocks[depth](x))
        return F.linear(x, self.head.to(x.dtype))


class RecurrentHeads(nn.Module):
    """One head for all depths, which reads its own last feature and the token between.

    Clover's regressive connection (Xiao et al., arXiv 2405.00263) without its attention: the
    feature of depth k is f + SiLU(W f) with f = A [feature of depth k - 1, embedding of the token
    before depth k]. Depth 0 reads the state of the target.

    Args:
        head: projection of the target, [V, D]; it is no parameter.
        depth: depths K that are drafted.
        states: as of ``HydraHeads``.
    """

    head: Tensor

    def __init__(self, head: Tensor, depth: int, states: int = 1):
        super().__init__()
        self.depth, self.width = depth, head.shape[1]
        self.register_buffer("head", head.detach().clone(), persistent=False)
        self.enter = nn.Linear(states * self.width, self.width, bias=False)
        self.merge = nn.Linear(2 * self.width, self.width, bias=False)
        self.gate = nn.Linear(2 * self.width, self.width)
        self.block = nn.Linear(self.width, self.width)
        for part in (self.enter, self.merge, self.gate, self.block):
            nn.init.zeros_(part.weight)
        for part in (self.gate, self.block):
            nn.init.zeros_(part.bias)
        self.enter.weight.data[:, (states - 1) * self.width :] = torch.eye(self.width)
        self.merge.weight.data[:, : self.width] = torch.eye(self.width)

    def forward(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """See ``DraftHeads``."""
        x = self.enter(state.to(self.enter.weight.dtype))
        for k in range(depth + 1):
            given = torch.cat([x, embedded[..., k, :].to(x.dtype)], -1)
            x = self.merge(given) + F.silu(self.gate(given))
            x = x + F.silu(self.block(x))
        return F.linear(x, self.head.to(x.dtype))


class TrigramHeads(nn.Module):
    """A head for each depth, which reads the state and an encoding of the last three tokens.

    Chimera's tri-gram encoder (Zeng et al., arXiv 2402.15758) without the layer over the whole text
    behind it, whose part the target's last state takes: with g = B SiLU(A [three embeddings]) the
    feature of depth k is x = C_k [state, g], then x + SiLU(W_k x). Of the tokens before the last
    committed one nothing is read.

    Args:
        head: projection of the target, [V, D]; it is no parameter.
        depth: number of heads K.
        states: as of ``HydraHeads``.
    """

    head: Tensor

    def __init__(self, head: Tensor, depth: int, states: int = 1):
        super().__init__()
        self.depth, self.width = depth, head.shape[1]
        self.register_buffer("head", head.detach().clone(), persistent=False)
        self.enter = nn.Linear(3 * self.width, self.width)
        self.leave = nn.Linear(self.width, self.width, bias=False)
        size = (states + 1) * self.width
        merges = [nn.Linear(size, self.width, bias=False) for _ in range(depth)]
        blocks = [nn.Linear(self.width, self.width) for _ in range(depth)]
        self.merges, self.blocks = nn.ModuleList(merges), nn.ModuleList(blocks)
        last = slice((states - 1) * self.width, states * self.width)
        with torch.no_grad():
            for merge, block in zip(merges, blocks, strict=True):
                merge.weight.zero_()
                merge.weight[:, last] = torch.eye(self.width)
                block.weight.zero_()
                block.bias.zero_()

    def forward(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """See ``DraftHeads``."""
        tokens = embedded[..., max(0, depth - 2) : depth + 1, :]
        tokens = F.pad(tokens, (0, 0, 3 - tokens.shape[-2], 0))
        dtype = self.enter.weight.dtype
        feature = self.leave(F.silu(self.enter(tokens.flatten(-2).to(dtype))))
        x = self.merges[depth](torch.cat([state.to(dtype), feature], -1))
        x = x + F.silu(self.blocks[depth](x))
        return F.linear(x, self.head.to(x.dtype))


def _linear(modules: nn.ModuleList, number: int) -> nn.Linear:
    """Return a layer of a list of linear layers."""
    return cast(nn.Linear, modules[number])


HEADS = {"heads": HydraHeads, "recurrent": RecurrentHeads, "trigram": TrigramHeads}
TRUNKS = (*HEADS, *ENTRY_TRUNKS)


def hydra_of(
    net: Mapping[str, Any], head: Tensor
) -> HydraHeads | RecurrentHeads | TrigramHeads | CloverLayer | ChimeraLayer:
    """Make Hydra heads from the arguments of a folder: ``trunk``, ``depth`` and ``states``."""
    trunk, depth, states = net["trunk"], int(net["depth"]), int(net["states"])
    if trunk in ENTRY_TRUNKS:
        return ENTRY_TRUNKS[trunk](head.shape[1], depth, states)
    return HEADS[trunk](head, depth, states)
