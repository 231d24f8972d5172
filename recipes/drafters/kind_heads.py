"""Kinds ``medusa`` and ``hydra``: heads that read hidden states of the model.

With the state that token t is drawn from, the head of depth k gives token t + 1 + k. Its loss
weighs 0.8^k, as Medusa's does; the target of a head is the model's distribution there, and not
its token alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.models.adapters.draft_models import require_one_width
from gen.models.draft_heads.heads import TRUNKS, MedusaHeads, hydra_of
from gen.models.draft_heads.trunks import ENTRY_TRUNKS
from gen.models.targets.trained_drafters import projection
from gen.recipes.drafters.base import DepthOptions, Kind, Net
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.losses import acceptance, mean_over
from gen.recipes.drafters.unrolls import unrolled

LAST = "model.norm"  # what the projection to the vocabulary reads
DECAY = 0.8


@dataclass(frozen=True)
class HydraOptions(DepthOptions):
    """Options of Hydra heads.

    Attributes:
        trunk: heads, recurrent (Clover without attention), trigram (Chimera without its layer),
            clover or chimera.
        layers: numbers of layers whose hidden states are read beside the last, joined by commas.
    """

    trunk: str = "heads"
    layers: str = ""


class _Heads(Kind):
    """Heads over hidden states, as many as the option ``depth`` says."""

    options_type = DepthOptions

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        return (LAST,)

    def arguments(self) -> dict[str, Any]:
        return {"depth": self.options.depth}

    def depth_logq(self, net: Net, batch: Batch, depth: int) -> Tensor:
        """Return the distributions of the drafts of one depth.

        Args:
            net: the heads.
            batch: sequences.
            depth: the head, k.

        Returns:
            Log-probabilities [B, T - 1 - k, V] of tokens 1 + k .. T - 1.
        """
        total = batch.tokens.shape[1]
        states = torch.cat([batch.states[name] for name in self.teacher.layers], -1)
        count = total - 1 - depth
        windows = batch.tokens.unfold(1, depth + 1, 1)[:, :count]  # tokens t .. t + k
        table = self.teacher.model.model.get_input_embeddings()
        embedded = table(windows).detach().to(states.dtype)
        logits = net(depth, states[:, :count], embedded)
        return self.logprobs(logits, self.positions(batch)[:, 1 + depth :])

    def every_logq(self, net: Net, batch: Batch, depths: int) -> list[Tensor]:
        """Return the distributions of the first depths (``depth_logq``), one after the other."""
        return [self.depth_logq(net, batch, k) for k in range(depths)]

    def usable(self, batch: Batch) -> Tensor:
        weight = batch.weight.clone()
        weight[:, 0] = 0  # before the first forward pass there is no state
        return weight

    def logq(self, net: Net, batch: Batch) -> Tensor:
        first = self.every_logq(net, batch, 1)[0]
        return torch.cat([torch.full_like(first[:, :1], -torch.inf), first], 1)

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        total, weights, figures = torch.zeros(()), 0.0, {}
        depths = min(self.options.depth, batch.tokens.shape[1] - 1)
        for k, logq in enumerate(self.every_logq(net, batch, depths)):
            logp, logq = batch.logp[:, 1 + k :], logq.float()
            weight = batch.weight[:, 1 + k :]
            total = total + DECAY**k * mean_over(self.divergence(logp, logq), weight)
            weights += DECAY**k
            accepted = mean_over(acceptance(logp, logq.detach()), weight)
            figures[f"acceptance {k}"] = accepted.item()
        return total / weights, figures


class Medusa(_Heads):
    """A head for each depth, which reads no draft. Options: ``DepthOptions``."""

    name = "medusa"

    def network(self) -> nn.Module:
        return MedusaHeads(projection(self.teacher.target, self.name).float(), self.options.depth)


class Hydra(_Heads):
    """Heads that read the drafts before them. Options: ``HydraOptions``."""

    name = "hydra"
    options_type = HydraOptions

    def __init__(self, teacher: Teacher, options: HydraOptions):
        if options.trunk not in TRUNKS:
            raise unknown("trunk", options.trunk, TRUNKS, "--options")
        if options.trunk in ENTRY_TRUNKS:
            require_one_width(teacher.model, f"hydra with trunk={options.trunk}")
        super().__init__(teacher, options)

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        wanted = self.options.layers
        numbers = [n.strip() for n in wanted.split(",") if n.strip()]
        if not all(n.isdigit() for n in numbers):
            raise GenError(f"option layers came as {wanted!r}; expected numbers such as 0,1")
        return (*(f"model.layers.{n}" for n in numbers), LAST)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {
            "trunk": self.options.trunk,
            "states": len(self.teacher.layers),
        }

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return hydra_of(self.arguments(), projection(self.teacher.target, self.name).float())

    def every_logq(self, net: Net, batch: Batch, depths: int) -> list[Tensor]:
        trunk = ENTRY_TRUNKS.get(self.options.trunk)
        if trunk is None:
            return super().every_logq(net, batch, depths)
        head = self.teacher.model.output_weight.float()
        positions, made = self.positions(batch), []
        outputs = unrolled(self.teacher, net, batch, depths, trunk.num_tokens)
        for k, read in enumerate(outputs):
            logits = F.linear(read[:, 1 + k :].float(), head)
            made.append(self.logprobs(logits, positions[:, 1 + k :]))
        return made
