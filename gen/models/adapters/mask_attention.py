"""Models with a mask token behind their vocabulary, at which alone their attention is tuned."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gen.models.adapters.layer_plans import layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.draft_heads.layer_maps import LowRank

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class MaskAttention(nn.Module):
    """What is trained: the mask's embedding, and additions to projections by their names.

    Args:
        model: the target's model.
        layers: number of layers, the last ones.
        rank: r of every addition.
    """

    def __init__(self, model: SharedModel, layers: int, rank: int):
        super().__init__()
        table = model.input_embeddings.weight
        self.vector = nn.Parameter(table.detach().float().mean(0))
        parts = dict(model.model.named_modules())
        found = layers_of(model.model, model.num_layers)
        names = [f"{found}.{n}." for n in range(model.num_layers - layers, model.num_layers)]
        self.targets = [
            name
            for name, part in parts.items()
            if name.endswith(PROJECTIONS) and name.startswith(tuple(names))
        ]
        self.additions = nn.ModuleList(LowRank(parts[name], rank) for name in self.targets)


class _Masks:
    """Which inputs of a pass are masks, bool [B, L], for the layers behind the embedding."""

    def __init__(self) -> None:
        self.at = torch.zeros(0, dtype=torch.bool)


class _Embedding(nn.Module):
    """Embedding of tokens, and of the mask as the id behind them; it notes where masks are."""

    def __init__(self, base: nn.Embedding, vector: nn.Parameter, masks: _Masks):
        super().__init__()
        self.base, self.vector, self.masks = base, vector, masks

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        self.masks.at = ids >= len(self.base.weight)
        tokens = self.base(ids.clamp_max(len(self.base.weight) - 1))
        return torch.where(self.masks.at[..., None], self.vector.to(tokens.dtype), tokens)


class _Projection(nn.Module):
    """Projection with an addition at masks."""

    def __init__(self, base: nn.Linear, addition: LowRank, masks: _Masks):
        super().__init__()
        self.base, self.addition, self.masks = base, addition, masks
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return torch.where(self.masks.at[..., None], out + self.addition(x), out)


def with_masks(model: SharedModel, attention: MaskAttention) -> Any:
    """Make the network that takes the id V, one behind the vocabulary, as the mask token.

    It shares all parameters with the model's network and with ``attention``.
    """
    masks, network = _Masks(), model.model
    parts = dict(network.named_modules())
    table = next(name for name, part in parts.items() if part is model.input_embeddings)
    network = replaced(network, table, _Embedding(parts[table], attention.vector, masks))
    for name, addition in zip(attention.targets, attention.additions, strict=True):
        projection = _Projection(cast(nn.Linear, parts[name]), cast(LowRank, addition), masks)
        network = replaced(network, name, projection)
    return network
