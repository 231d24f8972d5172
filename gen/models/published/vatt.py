"""VATT's model of sounds: masked EnCodec tokens given the hidden states of a language model (arXiv
2411.05679).

With states h of C condition rows and codes c of T frames of K codebooks,

    v = W h + p[:C] + m_v                      a = W' sum_k table_k[c_k] + p[C : C + T] + m_a
    o = decoder(encoder([v; a]))               logits_k[t] = H_k o[C + t]

Rows of the condition and of the sound have their own norms and MLPs in the encoder, and attend to
each other with ALiBi. The unconditional condition is W h = 0.

Released training read the K heads' logits in the order (k, t) and the targets in the order (t, k).
Logit n = k T + t of the heads is therefore about frame n // K and codebook n % K, and released
weights decode what they learned only with that map. ``permuted=False`` is for weights whose head k
is about codebook k.

The tables are EnCodec's codebooks, which the checkpoint does not hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.load.weights import Weights, fill, without_storage

HEAD = 64  # channels of an attention head
# a Lightning checkpoint holds the language model as ``encoder``
RENAMES = ((r"^encoder\.", "language_model."), (r"^audio_token_decoder\.", ""))
DROP = (r"^language_model\.", r"^quantizer\.")


class VattSizes(NamedTuple):
    """Sizes of a model: channels, channels of states, heads, layers of encoder and decoder, codes
    and codebooks, channels of a codebook's vectors, positions."""

    width: int
    states: int
    heads: int
    encoder: int
    decoder: int
    codes: int
    streams: int
    latent: int
    positions: int


def sizes_of(shapes: Mapping[str, Sequence[int]]) -> VattSizes:
    """Read sizes from the shapes of a checkpoint's tensors.

    Raises:
        GenError: a tensor that tells them is missing.
    """
    first = "audio_token_decoder."

    def depth(part: str) -> int:
        pattern = re.compile(rf"{first}{part}\.attn_layers\.layers\.(\d+)\.1\.to_q\.weight")
        return sum(bool(pattern.fullmatch(key)) for key in shapes)

    try:
        streams, latent = shapes[f"{first}embedding.special.MASK"]
        codes, width = shapes[f"{first}classifier.0.weight"]
        return VattSizes(
            width,
            shapes[f"{first}img_linear.weight"][1],
            shapes[f"{first}encoder.attn_layers.layers.0.1.to_q.weight"][0] // HEAD,
            depth("encoder"),
            depth("decoder"),
            codes,
            streams,
            latent,
            shapes[f"{first}pos_embed"][1],
        )
    except KeyError as error:
        raise GenError(
            f"the weights lack {error}; expected those of VATT's model of sounds"
        ) from None


class _Ways(nn.Module):
    """Module twice: ``A`` for rows of the condition, ``B`` for those of the sound."""

    def __init__(self, of_condition: nn.Module, of_sound: nn.Module):
        super().__init__()
        self.A, self.B = of_condition, of_sound

    def forward(self, x: Tensor, split: int) -> Tensor:
        return torch.cat([self.A(x[:, :split]), self.B(x[:, split:])], 1)


class _Attention(nn.Module):
    """Multi-head attention with ALiBi."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        inner = heads * HEAD
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_k = nn.Linear(width, inner, bias=False)
        self.to_v = nn.Linear(width, inner, bias=False)
        self.to_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        inner = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU())
        self.ff = nn.Sequential(inner, nn.Dropout(0.0), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class _Layers(nn.Module):
    """Pre-norm layers: attention and MLPs in turn. ``ways``: norms and MLPs exist twice.

    In released weights all norms of an encoder with two ways are one module, stored under the name
    of each layer.
    """

    def __init__(self, width: int, heads: int, depth: int, ways: bool):
        super().__init__()
        self.heads, self.ways = heads, ways

        def both(make):
            return _Ways(make(), make()) if ways else make()

        def norm():
            return both(lambda: nn.LayerNorm(width))

        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention, mlp = _Attention(width, heads), both(lambda: _MLP(width))
            self.layers.append(nn.ModuleList([nn.ModuleList([norm()]), attention]))
            self.layers.append(nn.ModuleList([nn.ModuleList([norm()]), mlp]))
        self.final_norm = norm()

    def forward(self, x: Tensor, split: int) -> Tensor:
        more = (split,) if self.ways else ()
        bias = alibi(self.heads, x.shape[1], x.device)
        for (norm,), block in self.layers:
            y = norm(x, *more)
            x = x + (block(y, bias) if isinstance(block, _Attention) else block(y, *more))
        return self.final_norm(x, *more)


def alibi(heads: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return ALiBi's symmetric bias [heads, length, length]: minus slope times distance."""

    def slopes(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    of_heads = slopes(power) + slopes(2 * power)[0::2][: heads - power]
    at = torch.arange(length, device=device)
    distance = (at - at[:, None]).abs()
    return -torch.tensor(of_heads, device=device)[:, None, None] * distance


class _Trunk(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, ways: bool):
        super().__init__()
        self.attn_layers = _Layers(width, heads, depth, ways)


class _Embedding(nn.Module):
    def __init__(self, sizes: VattSizes):
        super().__init__()
        mask = nn.Parameter(torch.zeros(sizes.streams, sizes.latent))
        self.special = nn.ParameterDict({"MASK": mask})
        self.out_proj = nn.Linear(sizes.latent, sizes.width)


class Vatt(nn.Module):
    """Network with the names of the published tensors."""

    def __init__(self, sizes: VattSizes):
        super().__init__()
        self.sizes, d = sizes, sizes.width
        self.modality_v = nn.Parameter(torch.zeros(1, 1, d))
        self.modality_a = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.zeros(1, sizes.positions, d))
        self.encoder = _Trunk(d, sizes.heads, sizes.encoder, True)
        self.decoder = _Trunk(d, sizes.heads, sizes.decoder, False)
        self.embedding = _Embedding(sizes)
        heads = (nn.Linear(d, sizes.codes, bias=False) for _ in range(sizes.streams))
        self.classifier = nn.ModuleList(heads)
        self.img_linear = nn.Linear(sizes.states, d)

    def forward(self, states: Tensor, codes: Tensor, tables: Tensor, null: Tensor) -> Tensor:
        """Compute the heads' logits [B, K, T, V].

        Args:
            states: of the language model, [B, C, S].
            codes: long [B, K, T]; V is the mask.
            tables: codebooks, [K, V, latent].
            null: rows without a condition, bool [B].
        """
        rows, masks = states.shape[1], self.embedding.special["MASK"]
        known = torch.cat([tables.to(masks), masks[:, None]], 1)  # [K, V + 1, latent]
        streams = torch.arange(len(known), device=codes.device)[:, None]
        a = self.embedding.out_proj(known[streams, codes].sum(1))
        v = self.img_linear(states.to(a)).masked_fill(null[:, None, None], 0.0)
        at = self.pos_embed[:, : rows + a.shape[1]]
        x = torch.cat([v + at[:, :rows] + self.modality_v, a + at[:, rows:] + self.modality_a], 1)
        x = self.decoder.attn_layers(self.encoder.attn_layers(x, rows), rows)[:, rows:]
        return torch.stack([head(x) for head in self.classifier], 1)


def by_frame(logits: Tensor, permuted: bool) -> Tensor:
    """Return the logits of each frame and codebook, [B, T, K, V], of the heads' [B, K, T, V].

    ``permuted``: by the map of released training (see the module).
    """
    streams, frames = logits.shape[1:3]
    if permuted:
        return logits.flatten(1, 2).unflatten(1, (frames, streams))
    return logits.transpose(1, 2)


class VattLM(ModelAdapter):
    """Masked model of VATT: a canvas of frames of K codes each, frame after frame.

    A prompt is one token: ``condition_token(n)`` stands for condition n, whose features are
    ``states`` [C, S], and ``null_token(n)`` for its absence. Positions depend on C, so rows
    whose conditions differ in length run one after the other.
    """

    model: Vatt

    def __init__(self, model: Vatt, tables: Tensor, permuted: bool = True):
        sizes, expected = model.sizes, (model.sizes.streams, model.sizes.codes, model.sizes.latent)
        if tuple(tables.shape) != expected:
            raise GenError(
                f"the codebooks have shape {tuple(tables.shape)}; expected {expected}, those that"
                " the model was trained with"
            )
        self.model, self.tables, self.permuted = model.eval(), tables, permuted
        self.mask_token_id, self.vocab_size = sizes.codes, sizes.codes + 1

    def condition_token(self, number: int) -> int:
        return self.vocab_size + 2 * number

    def null_token(self, number: int) -> int:
        """Return the token that stands for the absence of condition ``number``."""
        return self.condition_token(number) + 1

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        """Return logits [B, T K, V + 1], frame after frame; see ``MaskedModel``."""
        streams = self.model.sizes.streams
        codes = ids[:, -canvas_length:].unflatten(1, (-1, streams)).transpose(1, 2)
        marks = ids[:, 0] - self.vocab_size
        states = [self.features[n]["states"] for n in (marks // 2).tolist()]
        out = self.tables.new_full(
            (len(ids), canvas_length, self.vocab_size), -torch.inf, dtype=torch.float32
        )
        lengths = torch.tensor([len(s) for s in states])
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            given = torch.stack([states[r] for r in rows.tolist()])
            logits = self.model(given, codes[rows], self.tables, marks[rows] % 2 == 1)
            out[rows, :, :-1] = by_frame(logits, self.permuted).flatten(1, 2).float()
        return out


def load_vatt(
    path: str | Path,
    tables: Tensor,
    permuted: bool = True,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> VattLM:
    """Load VATT's model of sounds from its published checkpoint.

    Args:
        path: Lightning checkpoint, or a folder with its tensors as safetensors. The tensors of the
            language model in it are left out.
        tables: EnCodec's codebooks, [K, V, latent].
        permuted: map logits as released training did.
        device: device of the model.
        dtype: dtype of the model.

    Raises:
        GenError: missing, extra or mis-shaped tensors, or codebooks of another shape.
    """
    weights = Weights(path)
    sizes = sizes_of(weights.shapes)
    model = without_storage(lambda: Vatt(sizes))
    fill(model, weights, rename=RENAMES, drop=DROP, device=device, dtype=dtype, name=path)
    return VattLM(model, tables.to(device, dtype), permuted)
