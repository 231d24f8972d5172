"""Kind ``flexdraft``: the model's attention tuned at mask tokens alone (FlexDraft).

Groups of k masks stand behind tokens of the target's sequences, as in a pass that drafts. Mask j of
a group is about the j-th token behind the one that the pass adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.models.adapters.mask_attention import MaskAttention, with_masks
from gen.recipes.drafters.base import Net
from gen.recipes.drafters.data import Batch
from gen.recipes.drafters.kind_parallel import DECAY, Parallel, ParallelOptions
from gen.recipes.drafters.losses import acceptance, mean_over
from gen.samplers.causal.drafters.one_pass import FLEXDRAFT as KIND


@dataclass(frozen=True)
class FlexOptions(ParallelOptions):
    """Options of the kind.

    Attributes:
        layers: layers whose attention is tuned, the last ones; 0 for all.
        rank: rank of what is added to a projection.
    """

    layers: int = 0
    rank: int = 8
    groups: int = 6


class FlexKind(Parallel):
    """The model's attention at mask tokens. Options: ``FlexOptions``."""

    name = KIND
    options_type = FlexOptions

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.teacher.model
        model.model.requires_grad_(False)
        self.attention = MaskAttention(model, self._layers, self.options.rank)
        return with_masks(model, self.attention)

    @property
    def _layers(self) -> int:
        return self.options.layers or self.teacher.model.num_layers

    def masks(self) -> Tensor:
        return torch.full((self.options.depth,), self.teacher.model.config.vocab_size)

    def run(self, net: Net, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return net(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits

    def logq(self, net: Net, batch: Batch) -> Tensor:
        total = batch.tokens.shape[1]
        _, further, anchors = self.all_logq(net, batch, total)
        out = further.new_full((*anchors.shape, further.shape[-1]), -torch.inf)
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        out[row, anchors] = further[:, :, 0]
        return out.roll(1, 1)  # a mask behind position t is about the one after it

    def usable(self, batch: Batch) -> Tensor:
        weight = batch.weight.clone()
        weight[:, 0] = 0  # the first token has no draft
        return weight

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        _, further, anchors = self.all_logq(net, batch, self.options.groups)
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        losses, figures, total = [], {}, batch.tokens.shape[1]
        for k in range(self.options.depth):
            at = anchors + 1 + k
            logp = batch.logp[row, at.clamp_max(total - 1)]
            weight = batch.weight[row, at.clamp_max(total - 1)] * (at < total)
            logq = further[:, :, k].float()
            losses.append(DECAY**k * mean_over(self.divergence(logp, logq), weight))
            accepted = mean_over(acceptance(logp, logq.detach()), weight)
            figures[f"acceptance {k + 1}"] = accepted.item()
        scale = sum(DECAY**k for k in range(self.options.depth))
        return torch.stack(losses).sum() / scale, figures

    def arguments(self) -> dict[str, Any]:
        sizes = {"layers": self._layers, "rank": self.options.rank}
        return super().arguments() | sizes

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        return dict(self.attention.named_parameters())
