"""Kinds ``masked`` and ``prompt``: all drafts in one forward pass, at mask tokens.

A training sequence is a prompt with its tokens, followed by groups of k - 1 masks. The masks of a
group stand at the positions behind one token and attend to what stands up to it and to the masks of
their own group before them, which is what a draft pass computes there.

    masked   a small model of the model's architecture with one mask token (DEER's drafter)
    prompt   the model itself, of which only the embeddings of k - 1 mask tokens are trained (PPD)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import PromptTokens, masked_network
from gen.recipes.drafters.base import DepthOptions, Kind, Net
from gen.recipes.drafters.data import Batch
from gen.recipes.drafters.losses import acceptance, mean_over

DECAY = 0.8


@dataclass(frozen=True)
class ParallelOptions(DepthOptions):
    """Options of both kinds.

    Attributes:
        depth: drafts k of a pass.
        groups: groups of masks per sequence.
    """

    depth: int = 5
    groups: int = 12


@dataclass(frozen=True)
class MaskedOptions(ParallelOptions):
    """Options of the kind ``masked``.

    Attributes:
        width: channels of a layer, a multiple of 32.
        depth_of_model: number of layers.
    """

    width: int = 64
    depth_of_model: int = 2


@dataclass(frozen=True)
class Groups:
    """Sequences with groups of masks behind them.

    Attributes:
        ids: long [B, S + A (k - 1)].
        positions: absolute positions, long, of the same shape.
        seen: bool [B, 1, S + A (k - 1), S + A (k - 1)], the columns that each one attends to.
        before: columns of the inputs of the positions, long [B, T].
        anchors: positions whose draft is each group's first, long [B, A].
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor
    before: Tensor
    anchors: Tensor


def grouped(batch: Batch, masks: Tensor, groups: int, generator: torch.Generator) -> Groups:
    """Put groups of masks behind sequences.

    Args:
        batch: sequences.
        masks: ids of the masks of a group, long [k - 1].
        groups: number of groups A at most.
        generator: draws the positions of the groups.
    """
    ids, before = batch.inputs()
    ids = ids[:, :-1]  # nothing is drafted behind the last token
    b, size = ids.shape
    total, count = batch.tokens.shape[1], len(masks)
    order = torch.rand(b, total, generator=generator) + (1 - batch.weight.cpu())
    anchors = order.argsort(1)[:, :groups].to(ids.device)  # those before the eos token first
    root = before.gather(1, anchors)  # columns of the tokens before the groups
    offset = torch.arange(1, count + 1, device=ids.device)
    at = (root[..., None] + offset).flatten(1)
    column = torch.arange(size, device=ids.device)
    positions = torch.cat([column.expand(b, -1), at], 1)
    ids = torch.cat([ids, masks.repeat(b, anchors.shape[1])], 1)
    causal = (column <= column[:, None]).expand(b, -1, -1)
    sees = column <= root.repeat_interleave(count, 1)[..., None]  # [b, A (k - 1), S]
    own = torch.block_diag(*[torch.ones(count, count).tril()] * anchors.shape[1]).bool()
    own = own.to(ids.device).expand(b, -1, -1)
    above = torch.cat([causal, torch.zeros_like(sees).transpose(1, 2)], 2)
    seen = torch.cat([above, torch.cat([sees, own], 2)], 1)[:, None]
    return Groups(ids, positions, seen, before, anchors)


class Parallel(Kind):
    """Drafts of one pass."""

    @abstractmethod
    def run(self, net: Net, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return logits [B, L, V] of ids at positions under a mask [B, 1, L, L]."""

    @abstractmethod
    def masks(self) -> Tensor:
        """Return the ids of the masks of a group, long [k - 1]."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        if self.teacher.model.features:
            raise GenError(
                f"the prompts of this model hold states, whose ids are those of the masks of a"
                f" drafter of kind {self.name}; expected another kind, such as ar or exit"
            )
        self.generator = torch.Generator().manual_seed(23)

    def logq(self, net: Net, batch: Batch) -> Tensor:
        return self.all_logq(net, batch, 1)[0]

    def all_logq(self, net: Net, batch: Batch, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distributions of first and further drafts.

        Returns:
            Log-probabilities [B, T, V] of the first draft at every position, those [B, A, k - 1, V]
            of the drafts behind A positions, and these positions, long [B, A].
        """
        made = grouped(batch, self.masks(), groups, self.generator)
        # a mask may be wider than what it is added to, and never narrower
        dtype = torch.promote_types(self.teacher.model.dtype, torch.float32)
        hidden = ~made.seen.expand(len(made.ids), -1, -1, -1)
        mask = torch.zeros_like(hidden, dtype=dtype)
        mask.masked_fill_(hidden, torch.finfo(torch.float32).min)
        logits = self.run(net, made.ids, made.positions, mask)
        row = torch.arange(len(logits), device=logits.device)[:, None]
        first = self.logprobs(logits[row, made.before], self.positions(batch))
        count, size = len(self.masks()), batch.logp.shape[-1]
        tail = logits[:, -made.anchors.shape[1] * count :]
        offset = torch.arange(1, count + 1, device=logits.device)
        at = made.anchors[..., None] + offset
        further = self.logprobs(tail, at.flatten(1)).view(*at.shape, size)
        return first, further, made.anchors

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        first, further, anchors = self.all_logq(net, batch, self.options.groups)
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        losses, figures = [], {}
        total = batch.tokens.shape[1]
        for k in range(self.options.depth):
            at = anchors + k
            logq = (first[row, anchors] if k == 0 else further[:, :, k - 1]).float()
            logp = batch.logp[row, at.clamp_max(total - 1)]
            weight = batch.weight[row, at.clamp_max(total - 1)] * (at < total)
            losses.append(DECAY**k * mean_over(self.divergence(logp, logq), weight))
            accepted = mean_over(acceptance(logp, logq.detach()), weight)
            figures[f"acceptance {k}"] = accepted.item()
        scale = sum(DECAY**k for k in range(self.options.depth))
        return torch.stack(losses).sum() / scale, figures

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the network."""
        return {"depth": self.options.depth}


class Masked(Parallel):
    """A small model over mask tokens. Options: ``MaskedOptions``."""

    name = "masked"
    options_type = MaskedOptions
    muon = ".layers."

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return masked_network(self.teacher.model, self.arguments()).float()

    def arguments(self) -> dict[str, Any]:
        sizes = {"width": self.options.width, "layers": self.options.depth_of_model}
        return super().arguments() | sizes

    def masks(self) -> Tensor:
        return torch.full((self.options.depth - 1,), self.teacher.model.config.vocab_size)

    def run(self, net: Net, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return net(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits


class Prompt(Parallel):
    """Trained embeddings of mask tokens. Options: ``ParallelOptions``."""

    name = "prompt"
    options_type = ParallelOptions

    def network(self) -> nn.Module:
        self.teacher.model.model.requires_grad_(False)
        table = self.teacher.model.model.get_input_embeddings().weight
        return PromptTokens(self.options.depth, table.float())

    def masks(self) -> Tensor:
        return torch.arange(self.options.depth - 1) + self._size

    @property
    def _size(self) -> int:
        return len(self.teacher.model.model.get_input_embeddings().weight)

    def run(self, net: Net, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        model = self.teacher.model
        table = torch.cat([model.model.get_input_embeddings().weight, net().float()])
        located = model.embedded(ids.clamp_max(self._size - 1), positions)
        # the location of a mask is the model's own for its position
        plain = model.model.get_input_embeddings()(ids.clamp_max(self._size - 1))
        return model.model(
            inputs_embeds=table[ids] + located - plain,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
        ).logits
