"""Drafting layer of LongSpec: a window over the last tokens, and the target's own keys and values
for everything before.

Slots count the tokens of prompt and output. The query of slot s is made of the embedding of token
s, and gives the distribution of token s + 1. Drafting i tokens behind the last committed one, the
target's keys end at slot s - i - 1.

    x = embedding of token s
    h = x + window(rms(x))         own keys of slots s - W + 1 .. s, made of embeddings alone
    h = h + far(rms(h))            keys and values of the target's last layer, as they stand in its
                                   cache
    h = h + mlp(rms(h))            head input = rms(h)

All keys of its own are made of the last W tokens, so that its memory does not grow with the text.

Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and
Verification" (arXiv 2502.17421). There the window has 512 slots and stands behind a few first
tokens that stay; here it has no such sinks, whose part the target's keys take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LongSpecShape:
    """Sizes of the layer.

    Attributes:
        width: channels of the target's embeddings and of what its head reads.
        heads: heads of queries, H.
        groups: heads of the target's keys, G.
        dim: channels d of a head.
        inner: channels of the MLP.
        window: slots W that its own attention sees.
    """

    width: int
    heads: int
    groups: int
    dim: int
    inner: int
    window: int


class LongSpecLayer(nn.Module):
    """The layer.

    Args:
        shape: its sizes.
    """

    def __init__(self, shape: LongSpecShape):
        super().__init__()
        self.shape, width, inner = shape, shape.width, shape.heads * shape.dim

        def linear(n: int, m: int) -> nn.Linear:
            return nn.Linear(n, m, bias=False)

        self.near_norm, self.far_norm, self.mlp_norm, self.last_norm = (
            nn.RMSNorm(width, eps=1e-6) for _ in range(4)
        )
        self.query, self.key, self.value = (linear(width, inner) for _ in range(3))
        self.near_out = linear(inner, width)
        self.far_query, self.far_out = linear(width, inner), linear(inner, width)
        self.up, self.down = linear(width, 2 * shape.inner), linear(shape.inner, width)

    def keys(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Make own keys and values [B, H, L, d] of embeddings [B, L, D]."""
        h = self.near_norm(x)
        return rotated(self._heads(self.key(h)), rotations), self._heads(self.value(h))

    def forward(
        self,
        x: Tensor,
        rotations: tuple[Tensor, Tensor],
        count: int,
        sees_near: Tensor,
        far: tuple[Tensor, Tensor],
        sees_far: Tensor,
    ) -> Tensor:
        """Run the layer over a stretch of embeddings; see ``output``.

        Args:
            x: embeddings [B, N, D].
            rotations: those of their slots, [B, N, d].
            count: number of last embeddings that are queries, L.
            sees_near: bool [B, L, N].
            far: keys and values of the target [B, G, S, d].
            sees_far: bool [B, L, S].
        """
        x = x.to(self.query.weight.dtype)
        near, (cos, sin) = self.keys(x, rotations), rotations
        here = x[:, -count:], (cos[:, -count:], sin[:, -count:])
        return self.output(*here, near, sees_near, far, sees_far)

    def output(
        self,
        x: Tensor,
        rotations: tuple[Tensor, Tensor],
        near: tuple[Tensor, Tensor],
        sees_near: Tensor,
        far: tuple[Tensor, Tensor],
        sees_far: Tensor,
    ) -> Tensor:
        """Return what the target's head reads, [B, L, D].

        Args:
            x: embeddings [B, L, D].
            rotations: cosines and sines [B, L, d] of their slots, as the target makes them.
            near: own keys and values [B, H, N, d].
            sees_near: which of them each query attends to, bool [B, L, N].
            far: keys and values of the target [B, G, S, d].
            sees_far: the same of them, bool [B, L, S].
        """
        query = rotated(self._heads(self.query(self.near_norm(x))), rotations)
        h = x + self.near_out(attended(query, near, sees_near))
        query = rotated(self._heads(self.far_query(self.far_norm(h))), rotations)
        h = h + self.far_out(attended(query, far, sees_far))
        gate, up = self.up(self.mlp_norm(h)).chunk(2, -1)
        return self.last_norm(h + self.down(F.silu(gate) * up))

    def _heads(self, x: Tensor) -> Tensor:
        """Split [B, L, H d] into [B, H, L, d]."""
        return x.unflatten(-1, (self.shape.heads, self.shape.dim)).transpose(1, 2)


def attended(query: Tensor, given: tuple[Tensor, Tensor], sees: Tensor) -> Tensor:
    """Attend from queries [B, H, L, d] to keys and values [B, G, N, d]: [B, L, H d].

    A query that sees nothing attends to nothing.
    """
    keys, values = (x.to(query.dtype) for x in given)
    grouped = {"enable_gqa": True} if keys.shape[1] != query.shape[1] else {}
    nothing = ~sees.any(-1)
    mask = (sees | nothing[..., None])[:, None]
    out = F.scaled_dot_product_attention(query, keys, values, mask, **grouped)
    out = out.masked_fill(nothing[:, None, :, None], 0.0)
    return out.transpose(1, 2).flatten(2)


def rotated(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, H, L, d] by cosines and sines [B, L, d] of transformers."""
    cos, sin = (r[:, None].to(x.dtype) for r in rotations)
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin
