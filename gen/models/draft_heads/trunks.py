"""Trunks of Hydra heads that see more than one slot: Clover's and Chimera's.

Both draft from entries (``entries``) and begin as the target's own head on the state of the
last slot. With e_t the embedding of token t, h_s the target's state that token s + 1 was drawn
from, and f_k the feature of depth k behind the root s:

    clover    a_s = block(h)_s               block: a transformer layer over the target's states
              f_k = f_(k-1) + attention(query e_(s+1+k), keys and values a_0 .. a_s, f_0 .. f_(k-1))
              with f_(-1) = a_s
    chimera   g_t = B SiLU(A [e_(t-2), e_(t-1), e_t])
              c_t = layer(g_0 .. g_t)        a transformer layer over all tokens
              f_k = m + SiLU(W_k m) with m = C_k [c_(s+1+k), f_(k-1)], f_(-1) = h_s

Clover's heads share their weights and a residual layer before the target's projection. Xiao et al.,
"Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge" (arXiv 2405.00263).
Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference
by Fusing all Tokens" (arXiv 2402.15758); there a head has a projection to the vocabulary of its
own, here its part behind C_k is the target's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.models.draft_heads.entries import (
    Entries,
    EntryLayer,
    TransformerBlock,
    rotated_entries,
)


class CloverLayer(EntryLayer):
    """Clover's regression: the query of a depth is its last token alone.

    Args:
        width: channels D of the target's states and embeddings.
        depth: depths that are drafted.
        states: number of layers whose states are read; the last one is the last norm's.
    """

    def __init__(self, width: int, depth: int, states: int = 1):
        super().__init__()
        self.depth, self.fuse = depth, fusing(width, states)
        self.block = TransformerBlock(width, 2 * width)
        self.token_norm, self.feature_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.attended = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.residual = nn.Linear(width, width)
        for part in (self.attended.weight, self.residual.weight, self.residual.bias):
            nn.init.zeros_(part)

    def entries(self, feature: Tensor, embedding: Tensor, slots: Tensor) -> Entries:
        query, given = self.query(self.token_norm(embedding)), self.feature_norm(feature)
        return rotated_entries(query, self.key(given), self.value(given), feature, slots)

    def output(self, feature: Tensor, attended: Tensor, depth: Tensor | int) -> Tensor:
        return feature + self.attended(attended.flatten(-2))

    def head_input(self, g: Tensor) -> Tensor:
        return g + F.silu(self.residual(g))


class ChimeraLayer(EntryLayer):
    """Chimera's layers: keys and values are of tokens alone, so that drafts have them as well.

    The feature of an entry is the one of the depth before and the code g side by side.

    Args:
        width: channels D of the target's states and embeddings.
        depth: number of heads K.
        states: number of layers whose states are read; the last one is the last norm's.
    """

    num_tokens = 3

    def __init__(self, width: int, depth: int, states: int = 1):
        super().__init__()
        self.depth, self.fuse = depth, fusing(width, states)
        self.enter = nn.Linear(3 * width, width)
        self.leave = nn.Linear(width, width, bias=False)
        self.layer = TransformerBlock(width, 2 * width)
        merges = [nn.Linear(2 * width, width, bias=False) for _ in range(depth)]
        blocks = [nn.Linear(width, width) for _ in range(depth)]
        self.merges, self.blocks = nn.ModuleList(merges), nn.ModuleList(blocks)
        with torch.no_grad():
            for merge, block in zip(merges, blocks, strict=True):
                merge.weight.zero_()
                merge.weight[:, width:] = torch.eye(width)
                block.weight.zero_()
                block.bias.zero_()

    def entries(self, feature: Tensor, embedding: Tensor, slots: Tensor) -> Entries:
        code = self.leave(F.silu(self.enter(embedding)))
        made = self.layer.entries(code, slots)
        return Entries(made.query, made.key, made.value, torch.cat([feature, code], -1))

    def output(self, feature: Tensor, attended: Tensor, depth: Tensor | int) -> Tensor:
        before, code = feature.chunk(2, -1)
        given = torch.cat([self.layer.output(code, attended), before], -1)
        if isinstance(depth, int):
            return self._head(given, depth)
        made = self._head(given, 0)
        for k in range(1, len(self.merges)):
            made = torch.where((depth == k)[..., None], self._head(given, k), made)
        return made

    def _head(self, given: Tensor, depth: int) -> Tensor:
        x = self.merges[depth](given)
        return x + F.silu(self.blocks[depth](x))

    def head_input(self, g: Tensor) -> Tensor:
        return g


def fusing(width: int, states: int) -> nn.Linear:
    """Return a map from the states of several layers to one feature, which begins as the last."""
    made = nn.Linear(states * width, width, bias=False)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[:, (states - 1) * width :] = torch.eye(width)
    return made


ENTRY_TRUNKS: dict[str, type[CloverLayer | ChimeraLayer]] = {
    "clover": CloverLayer,
    "chimera": ChimeraLayer,
}
