"""FlexDraft: a causal model drafts with mask tokens, at which alone its attention was tuned.

For the input x of a projection of attention (queries, keys, values, output) in the last layers,

    W x               at tokens, as before
    W x + U D x       at mask tokens; U [out, r] and D [r, in] are trained, and so is the embedding
                      of the mask

so tokens give the target's own distribution, to the last bit. Masks ride in the pass that verifies
(``gen.samplers.causal.drafters.one_pass``): mask j of a group stands where the j-th token behind
the accepted drafts would, and is about the one after it.

"FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided Calibration" (arXiv
2605.20022). There whole projections are trained, which is r = min(in, out); a small network
corrects the drafts by the token that the pass adds, which their masks do not know; and at large
batches passes that draft and passes that verify take turns. Those two are not here.

Guarantee: that of the verifier, whatever the weights.
Preset: ``flexdraft``, with 7 drafts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gen.core.method import method
from gen.core.registry import register
from gen.models.adapters.layer_plans import layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.targets.trained_drafters import language_model, read_drafter
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.heads import checked_load
from gen.samplers.causal.drafters.one_pass import OnePassDrafter, require_plain_history

KIND = "flexdraft"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LowRank(nn.Module):
    """Addition U D x to a projection; U begins at zero.

    Args:
        base: the projection.
        rank: r.
    """

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Compute U D x, [..., out], of x [..., in]."""
        return x @ self.down.T @ self.up.T


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


@method(
    "flexdraft",
    sampler="speculative",
    about="drafts with mask tokens, at which alone attention is tuned, in the pass that verifies",
    paper="2605.20022",
    title="FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided"
    " Calibration",
    params={"drafter": KIND, "num_speculative_tokens": 7},
)
@register("drafter", KIND)
class FlexDraft(DraftSource):
    """Drafts with mask tokens, at which alone the target's attention was tuned, in the pass that
    verifies the drafts before. Parameters: ``drafter_weights``, ``num_speculative_tokens``."""

    needs_weights = True
    shapes = False

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        require_plain_history(target, f"the drafter {KIND}")
        model = language_model(target, KIND)
        made = MaskAttention(model, int(facts.net["layers"]), int(facts.net["rank"]))
        network = with_masks(model, checked_load(made, weights, KIND))
        target.run_with(model.with_network(network))
        depth = int(sampler.num_speculative_tokens)
        return OnePassDrafter(model.config.vocab_size, depth, verifier)
