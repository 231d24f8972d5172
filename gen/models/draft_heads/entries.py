"""Layers that draft from entries: one for every slot of prompt and output.

The entry of slot s holds a feature, made of the target's hidden states at s, and the embeddings of
the last G tokens up to slot s + 1. From the entries up to s a layer makes the output of slot s, of
which the target's own head makes the distribution of token s + 2. Behind the last slot that the
target has computed, features are made of the outputs of the slot before: the layer feeds itself.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

THETA = 10_000.0


@dataclass
class Entries:
    """Queries, keys and values [B, L, H, d] of entries, and their features [B, L, W]."""

    query: Tensor
    key: Tensor
    value: Tensor
    feature: Tensor

    @property
    def cache(self) -> Tensor:
        """Keys and values, [B, L, 2, H, d]."""
        return torch.stack([self.key, self.value], 2)


class EntryLayer(nn.Module):
    """Layer that drafts from entries. Calling it runs all unrolls of training; see ``forward``.

    Attributes:
        num_tokens: number of tokens G whose embeddings an entry reads.
        fuse: map of the target's hidden states [..., F] to features [..., W].
        depth: number of depths that are drafted; None for any.
        block: layer over the features of the slots that the target has computed; None for none.
    """

    num_tokens: ClassVar[int] = 1
    fuse: nn.Linear
    depth: int | None = None
    block: TransformerBlock | None  # a default here would hide the module

    def __init__(self):
        super().__init__()
        self.block = None

    @abstractmethod
    def entries(self, feature: Tensor, embedding: Tensor, slots: Tensor) -> Entries:
        """Make entries.

        Args:
            feature: features [B, L, W].
            embedding: embeddings of the last G tokens up to the one behind each slot, [B, L, G E].
            slots: long [B, L].
        """

    @abstractmethod
    def output(self, feature: Tensor, attended: Tensor, depth: Tensor | int) -> Tensor:
        """Make the outputs [B, L, W] of entries.

        Args:
            feature: features of the entries, as ``entries`` returned them.
            attended: what the entries attended to, [B, L, H, d].
            depth: drafts before the one that each output is about, long [B, L] or one number.
        """

    @abstractmethod
    def head_input(self, g: Tensor) -> Tensor:
        """Return what the target's head reads, [B, L, D], of outputs [B, L, W]."""

    def next_feature(self, g: Tensor) -> Tensor:
        """Return the features [B, L, W] of the slots behind those of outputs [B, L, W]."""
        return g

    def forward(self, states: Tensor, embedding: Tensor, unrolls: int) -> list[Tensor]:
        """Run the layer over whole sequences, fed by the target and then by itself.

        In unroll i the entry of slot s has the output of slot s - 1 in unroll i - 1 as its feature.
        It attends to what it would find in decoding i - 1 tokens behind the target: the target's
        entries up to slot s - i + 1, and the drafted entries of the slots in between.

        Args:
            states: hidden states of the target [B, S, F].
            embedding: embeddings of the tokens of the slots, [B, S, G E].
            unrolls: number of unrolls n.

        Returns:
            What the target's head reads, [B, S, D], of every unroll. Unroll i has no meaning before
            slot i - 1.
        """
        slots = torch.arange(states.shape[1], device=states.device).expand(states.shape[:2])
        made: list[Entries] = []
        heads: list[Tensor] = []
        dtype = self.fuse.weight.dtype
        feature, embedding = self.fuse(states.to(dtype)), embedding.to(dtype)
        if self.block is not None:
            feature = self.block(feature, slots)
        for unroll in range(unrolls):
            made.append(self.entries(feature, embedding, slots))
            output = self.output(made[-1].feature, unrolled_attention(made), unroll)
            heads.append(self.head_input(output))
            feature = later(self.next_feature(output), 1)
        return heads


class TransformerBlock(nn.Module):
    """Transformer layer with rotary positions. It begins as the identity.

    Args:
        width: channels W; heads have 32 of them, or all where 32 do not divide W.
        inner: channels of the MLP.
    """

    def __init__(self, width: int, inner: int):
        super().__init__()

        def linear(n: int, m: int) -> nn.Linear:
            return nn.Linear(n, m, bias=False)

        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.attended = linear(width, width)
        self.up, self.down = linear(width, 2 * inner), linear(inner, width)
        nn.init.zeros_(self.attended.weight)
        nn.init.zeros_(self.down.weight)

    def entries(self, x: Tensor, slots: Tensor) -> Entries:
        """Make entries of x [B, L, W], which is their feature, at slots, long [B, L]."""
        given = self.norm(x)
        return rotated_entries(self.query(given), self.key(given), self.value(given), x, slots)

    def output(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the outputs [B, L, W] of x from what was attended to, [B, L, H, d]."""
        x = x + self.attended(attended.flatten(-2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Run the layer over whole sequences x [B, S, W] with causal attention."""
        made = self.entries(x, slots)
        return self.output(x, unrolled_attention([made]))


def num_heads(width: int) -> int:
    """Return the number of attention heads of a layer of ``width`` channels."""
    return width // 32 if width % 32 == 0 else 1


def rotated_entries(
    query: Tensor, key: Tensor, value: Tensor, feature: Tensor, slots: Tensor
) -> Entries:
    """Split projections [B, L, W] into heads, and rotate queries and keys by their slots."""
    heads = num_heads(query.shape[-1])
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    cos, sin = rotation(slots, q.dtype, q.shape[-1])
    return Entries(rotated(q, cos, sin), rotated(k, cos, sin), v, feature)


def later(x: Tensor, by: int) -> Tensor:
    """Move x [B, S, ...] to later slots, with zeros before."""
    if not by:
        return x
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], 1)


def last_tokens(embedded: Tensor, count: int) -> Tensor:
    """Join the embeddings of the last tokens up to the one behind each slot.

    Args:
        embedded: embeddings of the tokens of slots 0 .. S, [B, S + 1, E].
        count: number of tokens G; those before slot 0 are zeros.

    Returns:
        [B, S, G E], the oldest token first.
    """
    moved = [later(embedded, back)[:, 1:] for back in reversed(range(count))]
    return torch.cat(moved, -1)


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Let queries [n, L, H, d] attend to keys and values [n, S, H, d] that are seen, bool
    [n, L, S].

    Returns:
        [n, L, H, d]; anything for a query that sees nothing.
    """
    mask = (seen | ~seen.any(-1, keepdim=True))[:, None]
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def unrolled_attention(made: list[Entries]) -> Tensor:
    """Let the entries of the last unroll attend; see ``EntryLayer.forward``.

    Args:
        made: entries of all unrolls so far.

    Returns:
        [B, S, H, d].
    """
    first, last, back = made[0], made[-1], len(made) - 1
    query, scale = last.query, last.query.shape[-1] ** -0.5
    size = query.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", query, first.key) * scale
    slot = torch.arange(size, device=query.device)
    hidden = slot > slot[:, None] - back
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    drafted = [
        (later(entry.key, back - j), later(entry.value, back - j))
        for j, entry in enumerate(made)
        if j
    ]
    own = [(query * key).sum(-1).transpose(1, 2)[..., None] * scale for key, _ in drafted]
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.cat([scores, *own], -1).to(wide).softmax(-1).to(query.dtype)
    out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :size], first.value)
    for n, (_, value) in enumerate(drafted):
        out = out + weights[..., size + n].transpose(1, 2)[..., None] * value
    return out


def rotation(slots: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, L, 1, d / 2] of slots, long [B, L], for heads of ``size``."""
    half = torch.arange(size // 2, device=slots.device, dtype=torch.float64)
    angle = slots[..., None, None] * THETA ** (-half / (size // 2))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, L, H, d] by angles [B, L, 1, d / 2]."""
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
