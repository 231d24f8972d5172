"""Drafting layer of EAGLE: one transformer layer that goes on where the hidden states of its target
end.

Slots count the tokens of prompt and output. The entry of slot s holds the hidden states of the
target at s, fused to one feature, and the embedding of token s + 1. From the entries up to s the
layer makes the output of slot s, of which the target's own head makes the distribution of token
s + 2. Behind the last slot that the target has computed, the output of a slot is the feature of the
next one: the layer feeds itself.

    fused     f = fuse(low, middle, high states)
    entry     x = [rms(embedding), rms(f)];  q, k, v = x W, rotated by the slot
    output    g = f + attention;  g = g + mlp(rms(g));  head input = out(rms(g))

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (arXiv 2503.01840). There the layer is as wide as its target and has a head of its own; here
it is narrower, and the head is the target's. With ``rereads`` the feature of the next slot is made
of the predicted head input, as in EAGLE (arXiv 2401.15077); with ``gated`` features pass a gate
that the embedding opens, after the feature sampling of FSPAD (arXiv 2408.15562).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 32  # channels of an attention head
THETA = 10_000.0


@dataclass(frozen=True)
class EagleShape:
    """Sizes of the layer.

    Attributes:
        states: channels of the target's hidden states together.
        embedding: channels of the target's embeddings.
        out: channels that the target's head reads.
        width: channels of the layer, a multiple of 32.
        inner: channels of its MLP.
        rereads: the feature of a drafted slot is made of the predicted head input.
        gated: features pass a gate.
    """

    states: int
    embedding: int
    out: int
    width: int
    inner: int
    rereads: bool = False
    gated: bool = False


@dataclass
class Entries:
    """Queries, keys and values [B, L, H, d] of entries, and their features [B, L, W]."""

    query: Tensor
    key: Tensor
    value: Tensor
    feature: Tensor


class EagleLayer(nn.Module):
    """The layer. Calling it runs all unrolls of training; see ``forward``."""

    def __init__(self, shape: EagleShape):
        super().__init__()
        self.shape, width = shape, shape.width
        self.heads = width // HEAD

        def linear(n: int, m: int) -> nn.Linear:
            return nn.Linear(n, m, bias=False)

        self.fuse, self.token = linear(shape.states, width), linear(shape.embedding, width)
        if shape.rereads:
            self.reread = linear(shape.out, width)
        if shape.gated:
            self.gate_up, self.gate_down = linear(2 * width, 4 * width), linear(2 * width, width)
        self.token_norm, self.feature_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (linear(2 * width, width) for _ in range(3))
        self.attended = linear(width, width)
        self.mlp_norm, self.last_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = linear(width, 2 * shape.inner), linear(shape.inner, width)
        self.out = linear(width, shape.out)

    def entries(self, feature: Tensor, embedding: Tensor, slots: Tensor) -> Entries:
        """Make entries.

        Args:
            feature: features [B, L, W].
            embedding: embeddings of the tokens behind the slots, [B, L, E].
            slots: long [B, L].
        """
        token = self.token_norm(self.token(embedding))
        if self.shape.gated:
            value, gate = self.gate_up(torch.cat([token, feature], -1)).chunk(2, -1)
            feature = feature + self.gate_down(F.silu(gate) * value)
        x = torch.cat([token, self.feature_norm(feature)], -1)
        q, k, v = (f(x).unflatten(-1, (self.heads, HEAD)) for f in self._projections())
        cos, sin = rotation(slots, x.dtype)
        return Entries(rotated(q, cos, sin), rotated(k, cos, sin), v, feature)

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value

    def output(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Return the outputs [B, L, W] of entries from what they attended to, [B, L, H, d]."""
        g = feature + self.attended(attended.flatten(-2))
        gate, up = self.up(self.mlp_norm(g)).chunk(2, -1)
        return g + self.down(F.silu(gate) * up)

    def head_input(self, g: Tensor) -> Tensor:
        """Return what the target's head reads, [B, L, D], of outputs [B, L, W]."""
        return self.out(self.last_norm(g))

    def next_feature(self, g: Tensor) -> Tensor:
        """Return the features [B, L, W] of the slots behind those of outputs [B, L, W]."""
        return self.reread(self.head_input(g)) if self.shape.rereads else g

    def forward(self, states: Tensor, embedding: Tensor, unrolls: int) -> list[Tensor]:
        """Run the layer over whole sequences, fed by the target and then by itself.

        In unroll i the entry of slot s has the output of slot s - 1 in unroll i - 1 as its feature.
        It attends to what it would find in decoding i - 1 tokens behind the target: the target's
        entries up to slot s - i + 1, and the drafted entries of the slots in between.

        Args:
            states: hidden states of the target [B, S, F].
            embedding: embeddings of the tokens behind the slots [B, S, E].
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
        for _ in range(unrolls):
            made.append(self.entries(feature, embedding, slots))
            output = self.output(made[-1].feature, unrolled_attention(made))
            heads.append(self.head_input(output))
            feature = later(self.next_feature(output), 1)
        return heads


def later(x: Tensor, by: int) -> Tensor:
    """Move x [B, S, ...] to later slots, with zeros before."""
    if not by:
        return x
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], 1)


def unrolled_attention(made: list[Entries]) -> Tensor:
    """Let the entries of the last unroll attend; see ``EagleLayer.forward``.

    Args:
        made: entries of all unrolls so far.

    Returns:
        [B, S, H, d].
    """
    first, last, back = made[0], made[-1], len(made) - 1
    query, scale = last.query, HEAD**-0.5
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


def rotation(slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, L, 1, d / 2] of slots, long [B, L]."""
    half = torch.arange(HEAD // 2, device=slots.device, dtype=torch.float64)
    angle = slots[..., None, None] * THETA ** (-half / (HEAD // 2))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, L, H, d] by angles [B, L, 1, d / 2]."""
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
