"""Minimal network of a Llama's mathematics: what a forward pass costs at best, and whether its bits
depend on the width of the pass.

Projections are fused, keys and values are written to static buffers, attention is PyTorch's own,
weights are random. There is no cache object, no mask of rows and no choice of any kind, so that a
pass can be captured as it stands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.load.inflate import Shape, parse_size, require_llama

SLOTS = 320  # of keys and values of a row; the image model's sequences have 264
MODEL = "image-causal"
Cache = list[tuple[Tensor, Tensor]]


def shape_of(size: str) -> Shape:
    """Return the shape of the built-in image model, inflated to a size such as 300M."""
    return Shape.of(require_llama(MODEL)).enlarged(parse_size(size, "size"))


class Minimal:
    """Llama of a shape with random weights and the tokens of the image model, V of them."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.vocab: int = require_llama(MODEL)["vocab_size"]
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            x = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
            return x.div_(math.sqrt(columns))

        width, queries = shape.width, shape.heads * shape.dim
        both = queries + 2 * shape.groups * shape.dim
        sizes = ((both, width), (width, queries), (2 * shape.inner, width), (width, shape.inner))
        self.layers = [[matrix(*size) for size in sizes] for _ in range(shape.layers)]
        self.embeddings, self.head = matrix(self.vocab, width), matrix(self.vocab, width)
        self.embeddings *= math.sqrt(width)
        self.scale = torch.ones(width, device=device, dtype=dtype)
        self.slots = torch.arange(SLOTS, device=device)
        rates = 10_000 ** -(torch.arange(0, shape.dim, 2, device=device) / shape.dim)
        angles = (self.slots[:, None] * rates).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def new_cache(self, rows: int) -> Cache:
        """Return keys and values [B, K, S, d] of every layer, all zeros."""
        size = (2, rows, self.shape.groups, SLOTS, self.shape.dim)
        more = {"device": self.device, "dtype": self.dtype}
        return [tuple(torch.zeros(size, **more)) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Compute logits [B, L, V] of token ids [B, L] at positions long [L]."""
        shape, mask = self.shape, self.slots <= positions[:, None]
        parts = [shape.heads, shape.groups, shape.groups]
        grouped = shape.heads != shape.groups
        cos, sin = self.cos[positions], self.sin[positions]

        def normed(x: Tensor) -> Tensor:
            return F.rms_norm(x, (shape.width,), self.scale, 1e-6)

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        x = self.embeddings[ids]
        for (qkv, out, gate_up, down), (keys, values) in zip(self.layers, cache, strict=True):
            heads = F.linear(normed(x), qkv).unflatten(-1, (-1, shape.dim)).transpose(1, 2)
            q, k, v = heads.split(parts, 1)
            keys.index_copy_(2, positions, rotated(k))
            values.index_copy_(2, positions, v)
            seen = F.scaled_dot_product_attention(
                rotated(q), keys, values, mask, enable_gqa=grouped
            )
            x = x + F.linear(seen.transpose(1, 2).flatten(2), out)
            gate, up = F.linear(normed(x), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(normed(x), self.head)


class Invariance:
    """Share of positions whose logits have the same bits in passes of other widths.

    One text is fed in chunks. A pass is as wide as its chunk, or padded to a fixed number of rows:
    the chunk then stands at its beginning, or moved anywhere in it, among rows that repeat its
    first and last token. All are compared with chunks of one token.
    """

    CHUNKS = {"1": (1,), "4": (4,), "16": (16,), "mixed": (1, 7, 16, 3)}

    def __init__(self, device: str):
        self.device = device

    def shares(
        self,
        dtype: str,
        parameters: str,
        layers: int,
        length: int,
        rows: int,
        base: int,
        moved: bool,
    ) -> dict[str, float]:
        """Return the shares by the tokens of a chunk.

        Args:
            dtype: name of the floating-point type.
            parameters: size of the inflated model whose width the network has.
            layers: layers of the network.
            length: tokens of the text.
            rows: rows of padded passes; 0 for none.
            base: rows of the passes of one token that they are compared with.
            moved: whether chunks are moved.
        """
        network = Minimal(
            replace(shape_of(parameters), layers=layers), self.device, getattr(torch, dtype)
        )
        ids = torch.randint(network.vocab, (length,), generator=torch.Generator().manual_seed(0))
        text, found = ids.to(self.device), {}
        alone = self._fed(network, text, (1,), base, False)
        for name, chunks in self.CHUNKS.items():
            same = (self._fed(network, text, chunks, rows, moved) == alone).all(1)
            found[f"chunks {name}"] = same.double().mean().item()
        return found

    def _fed(
        self, network: Minimal, text: Tensor, chunks: Sequence[int], rows: int, moved: bool
    ) -> Tensor:
        """Return the logits [T, V] of a text [T] that is fed in chunks."""
        draws, cache = random.Random(0), network.new_cache(1)
        sizes, found, at = cycle(chunks), [], 0
        while at < len(text):
            end = min(at + next(sizes), len(text))
            free = max(0, rows - (end - at))
            before = draws.randint(0, free) if moved else 0
            here = torch.arange(at - before, end + free - before, device=text.device)
            here = here.clamp(at, end - 1)
            logits = network.forward(text[here][None], here, cache)
            found.append(logits[0, before : before + end - at])
            at = end
        return torch.cat(found)
