"""LlamaGen: a Llama over image codes in raster order, after a class or the features of a caption
(Sun et al., arXiv 2406.06525).

    x_l+1 = h + w2(silu(w1 n(h)) * w3 n(h)),   h = x_l + attention(n(x_l)),   n(x) = weight * x /
                                               sqrt(mean x^2 + 1e-5)

Rotary embeddings are two-dimensional: the pair (2i, 2i + 1) of a head of size d rotates by the row
of its code times 10000^(-4 j / d) for the first half of the pairs, and by the column for the second
half, with j counted within the half. At the P positions of the condition cosine and sine are both
0, so queries and keys are zero there: every code attends to them with equal weight, and only their
values matter. The published weights are trained this way.

Module names are the published keys. All sizes are read from the shapes of the weights, except the
number of heads, which follows from the published widths. A caption is right-aligned in its P
positions, after masked padding. The unconditional branch of a guided batch has the padding mask of
its caption, as in training, where captions are dropped and their masks are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.slot_cache import SlotCache

HEADS = {
    768: 12,
    1024: 16,
    1280: 20,
    1536: 24,
    2048: 32,
    2560: 40,
    3200: 32,
    4096: 32,
}  # number of heads by published width
DROP = (r"^freqs_cis$",)  # a table that follows from the sizes
BASE, EPS = 10000.0, 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a LlamaGen model.

    ``hidden``: width of the feed-forward layers. ``prompt``: P. ``classes``: of a class-conditional
    model, without the null class, else 0. ``caption``: feature width of a text-conditional model,
    else 0.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    prompt: int
    classes: int = 0
    caption: int = 0


def _key_value_heads(heads: int, dim: int, rows: int) -> int:
    """Count the heads of keys and values that ``rows`` rows of wqkv have beside those of queries.

    Raises:
        GenError: the number of heads does not fit.
    """
    size = dim // heads if isinstance(heads, int) and heads > 0 else 0
    if (
        not size
        or dim % heads
        or size % 4
        or rows % size
        or (rows // size - heads) % 2
        or not (kv := (rows // size - heads) // 2) > 0
        or heads % kv
    ):
        raise bad_value(
            "heads",
            heads,
            f"a number of heads for width {dim} and {rows} rows of wqkv, their size divisible by 4",
        )
    return kv


def sizes_of(
    shapes: Mapping[str, tuple[int, ...]], heads: int | None = None, name: str = ""
) -> Sizes:
    """Read the sizes from shapes of published weights by key.

    ``heads``: required for unpublished widths. Raises ``GenError`` for another network, and for a
    number of heads that does not fit.
    """

    def find(pattern):
        return next(
            (s for k, s in shapes.items() if re.fullmatch(pattern, k) and len(s) == 2), None
        )

    needed = {
        k: find(k)
        for k in (
            r"tok_embeddings\.weight",
            r"layers\.\d+\.attention\.wqkv\.weight",
            r"layers\.\d+\.feed_forward\.w1\.weight",
        )
    }
    by_class, by_text = (
        find(r"cls_embedding\.embedding_table\.weight"),
        find(r"cls_embedding\.uncond_embedding"),
    )
    absent = [k.replace(r"\d+", "N").replace("\\", "") for k, s in needed.items() if s is None]
    if not by_class and not by_text:
        absent.append("cls_embedding.embedding_table.weight or cls_embedding.uncond_embedding")
    if absent:
        raise GenError(f"the weights of {name} are not LlamaGen's: no matrix {', '.join(absent)}")
    (vocab_size, dim), (rows, _), (hidden, _) = needed.values()
    table = shapes.get("freqs_cis")
    if heads is None:
        heads = dim // (2 * table[1]) if table else HEADS.get(dim)
    if heads is None:
        raise GenError(
            f"the weights of {name} have width {dim}, whose number of heads is not known;"
            " expected the option heads"
        )
    kv = _key_value_heads(heads, dim, rows)
    layers = 1 + max(int(m[1]) for k in shapes if (m := re.match(r"layers\.(\d+)\.", k)))
    condition = (
        {"prompt": 1, "classes": by_class[0] - 1}
        if by_class
        else {"prompt": by_text[0], "caption": by_text[1]}
    )
    return Sizes(vocab_size, dim, layers, heads, kv, hidden, **condition)


class RMSNorm(nn.Module):
    """RMS norm with a weight per channel."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(
            x.dtype
        ) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [B, H, L, d] by angles with cosines and sines [B, 1, L, d /
    2]."""
    a, b = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention against a slot cache."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.split = [s.heads, s.kv_heads, s.kv_heads]
        self.wqkv = nn.Linear(s.dim, s.dim // s.heads * sum(self.split), bias=False)
        self.wo = nn.Linear(s.dim, s.dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: SlotCache, layer: int
    ) -> Tensor:
        q, k, v = (
            self.wqkv(x).unflatten(-1, (sum(self.split), -1)).transpose(1, 2).split(self.split, 1)
        )
        k, v = cache.update(rotated(k, cos, sin), v, layer)
        groups = self.split[0] // self.split[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(s.dim, s.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Transformer layer."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.attention, self.feed_forward = Attention(s), FeedForward(s)
        self.attention_norm, self.ffn_norm = RMSNorm(s.dim), RMSNorm(s.dim)

    def forward(self, x: Tensor, *attention_args) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *attention_args)
        return x + self.feed_forward(self.ffn_norm(x))


class Classes(nn.Module):
    """Class embeddings, with the null class last."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.embedding_table = nn.Embedding(s.classes + 1, s.dim)


class Projection(nn.Module):
    """Projection of caption features to the width of the model."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.fc1, self.fc2 = (
            nn.Linear(s.caption, s.dim, bias=False),
            nn.Linear(s.dim, s.dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Captions(nn.Module):
    """Caption embeddings. ``uncond_embedding``: features [P, width] of the empty caption."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.cap_proj = Projection(s)
        self.uncond_embedding = nn.Parameter(torch.zeros(s.prompt, s.caption))


class LlamaGen(nn.Module):
    """LlamaGen network: embeddings [B, L, D] at absolute positions [B, L] -> logits [B, L, V].

    ``columns``: codes per row of the image.
    """

    _no_split_modules = ("Block",)

    def __init__(self, sizes: Sizes, columns: int):
        super().__init__()
        self.sizes, self.columns = sizes, columns
        self.cls_embedding = Classes(sizes) if sizes.classes else Captions(sizes)
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines [B, 1, L, d / 2] at absolute positions [B, L], both 0 at
        positions of the condition."""
        half = self.sizes.dim // self.sizes.heads // 2
        dtype = torch.promote_types(dtype, torch.float32)
        speed = BASE ** -(torch.arange(0, half, 2, dtype=dtype, device=positions.device) / half)
        cell = positions - self.sizes.prompt
        code = cell.clamp_min(0)
        axes = torch.stack([code // self.columns, code % self.columns], -1).to(dtype)
        angles = (axes[..., None] * speed).flatten(-2)[:, None]
        is_condition = (cell < 0)[:, None, :, None]
        return (
            angles.cos().masked_fill(is_condition, 0),
            angles.sin().masked_fill(is_condition, 0),
        )

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """Compute logits [B, L, V] of embeddings [B, L, D] at positions [B, L]."""
        cos, sin = self.rotation(positions, x.dtype)
        for n, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, cache, n)
        return self.output(self.norm(x))


class PaddedCache(SlotCache):
    """Slot cache whose first ``start`` [B] slots are masked padding."""

    start: Tensor | None = None
    # the padding of all captions is set at once, so no row can begin later than the others
    select = None

    def at(self, positions: Tensor, dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
        mask = super().at(positions, dtype, last)
        if self.start is None:
            return mask
        padding = torch.arange(self.used, device=mask.device) < self.start[:, None]
        return mask.masked_fill(padding[:, None, None], torch.finfo(dtype).min)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.start = None if self.start is None else self.start[rows]


class LlamaGenLM(ModelAdapter):
    """Causal model over LlamaGen.

    Token ids below ``vocab_size`` are codes. The prompt of a class-conditional model is one token,
    ``vocab_size`` + class. The prompt of a text-conditional model is P times ``vocab_size`` + 1 +
    the number of the caption in the
    batch, whose ``features`` are ``{"features": [n, width]}`` with
    n <= P; or P times ``vocab_size`` for the empty caption.
    """

    compiles = True

    def __init__(self, model: LlamaGen):
        self.model, self.sizes = model.eval(), model.sizes
        self.vocab_size = model.sizes.vocab_size

    @property
    def output_heads(self) -> list[nn.Linear]:
        """See ``ModelAdapter``."""
        return [self.model.output]

    def class_prompt(self, number: int | None) -> list[int]:
        """Return the prompt of a class; None is the null class."""
        return [self.vocab_size + (self.sizes.classes if number is None else number)]

    def condition_token(self, number: int) -> int:
        """Return the token id at the prompt positions of a caption."""
        return self.vocab_size + 1 + number

    def no_caption(self) -> list[int]:
        """Return the prompt without a caption."""
        return [self.vocab_size] * self.sizes.prompt

    def new_cache(self, slots: int) -> PaddedCache:
        """Create an empty cache of ``slots`` positions."""
        cache = PaddedCache(self.sizes.layers, slots)
        cache.whole = self.graphs is not None
        return cache

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: PaddedCache) -> Tensor:
        """Compute logits [B, L, V] of tokens [B, L] at absolute positions [B, L]."""
        inputs = {"x": self._embedded(tokens, positions, cache)}
        return self.run_network(inputs, positions, cache.at(positions, self.dtype), cache)

    def network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """See ``ModelAdapter``."""
        return self.model(**inputs, positions=positions, mask=mask, cache=cache)

    def _embedded(self, tokens: Tensor, positions: Tensor, cache: PaddedCache) -> Tensor:
        """Embed codes and condition tokens [B, L]: [B, L, D]. Sets the padding of captions."""
        is_condition = tokens >= self.vocab_size
        x = self.model.tok_embeddings(tokens.masked_fill(is_condition, 0))
        if not bool(is_condition.any()):
            return x
        if self.sizes.classes:
            classes = (tokens - self.vocab_size).clamp_min(0)
            condition = self.model.cls_embedding.embedding_table(classes)
        else:
            table, cache.start = self._captions(tokens.amax(1) - self.vocab_size)
            index = positions.clamp_max(self.sizes.prompt - 1)
            condition = table.gather(1, index[..., None].expand(-1, -1, self.sizes.dim))
        return torch.where(is_condition[..., None], condition, x)

    def _captions(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Embed captions by number [B], 0 for the empty caption.

        Returns:
            Embedded conditions [B, P, D], and the number of padding positions before each [B].
        """
        embedder, half = self.model.cls_embedding, len(numbers) // 2
        has_caption = numbers > 0
        any_empty = (~has_caption).any()
        if any_empty and (
            len(numbers) % 2 or not bool(has_caption[:half].all()) or bool(has_caption[half:].any())
        ):
            raise ValueError(
                "some prompts have no caption; expected a guided batch, with as many captioned"
                " prompts before them, whose padding they share"
            )
        table = embedder.cap_proj(embedder.uncond_embedding).repeat(len(numbers), 1, 1)
        start = torch.zeros_like(numbers)
        rows = has_caption.nonzero()[:, 0].tolist()
        for row in rows:
            features = self.features[int(numbers[row]) - 1]["features"].to(table)
            padding = self.sizes.prompt - len(features)
            start[row] = padding
            table[row] = F.pad(embedder.cap_proj(features), (0, 0, padding, 0))
        if any_empty:
            start[half:] = start[:half]
        return table, start


def grid_of(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> int | None:
    """Return the side of the square training grid, or None if the weights do not show it."""
    table = shapes.get("freqs_cis")
    return math.isqrt(table[0] - sizes.prompt) if table else None
