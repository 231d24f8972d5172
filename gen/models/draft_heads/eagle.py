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

from gen.models.draft_heads.entries import Entries, EntryLayer, rotated_entries

HEAD = 32  # channels of an attention head


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


class EagleLayer(EntryLayer):
    """The layer. Calling it runs all unrolls of training; see ``EntryLayer.forward``."""

    def __init__(self, shape: EagleShape):
        super().__init__()
        self.shape, width = shape, shape.width

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
        token = self.token_norm(self.token(embedding))
        if self.shape.gated:
            value, gate = self.gate_up(torch.cat([token, feature], -1)).chunk(2, -1)
            feature = feature + self.gate_down(F.silu(gate) * value)
        x = torch.cat([token, self.feature_norm(feature)], -1)
        return rotated_entries(self.query(x), self.key(x), self.value(x), feature, slots)

    def output(self, feature: Tensor, attended: Tensor, depth: Tensor | int) -> Tensor:
        g = feature + self.attended(attended.flatten(-2))
        gate, up = self.up(self.mlp_norm(g)).chunk(2, -1)
        return g + self.down(F.silu(gate) * up)

    def head_input(self, g: Tensor) -> Tensor:
        return self.out(self.last_norm(g))

    def next_feature(self, g: Tensor) -> Tensor:
        return self.reread(self.head_input(g)) if self.shape.rereads else g
