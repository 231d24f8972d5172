"""Kinds ``medusa`` and ``hydra``: heads that read hidden states of the model.

With the state that token t is drawn from, the head of depth k gives token t + 1 + k. Its loss
weighs 0.8^k, as Medusa's does; the target of a head is the model's distribution there, and not
its token alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.losses import acceptance, mean_over
from gen.samplers.causal.drafters.head_networks import TRUNKS, MedusaHeads, hydra_of
from gen.samplers.causal.drafters.heads import projection
from gen.samplers.causal.drafters.trained import DrafterFacts, write_drafter

LAST = "model.norm"  # what the projection to the vocabulary reads
DECAY = 0.8


@dataclass(frozen=True)
class HeadOptions(Options):
    """Options of heads.

    Attributes:
        depth: number of heads.
    """

    depth: int = 4


@dataclass(frozen=True)
class HydraOptions(HeadOptions):
    """Options of Hydra heads.

    Attributes:
        trunk: heads, recurrent (Clover's) or trigram (Chimera's).
        layers: numbers of layers whose hidden states are read beside the last, joined by commas.
    """

    trunk: str = "heads"
    layers: str = ""


class _Heads(Kind):
    """Heads over hidden states."""

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        return (LAST,)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the network."""
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

    def usable(self, batch: Batch) -> Tensor:
        weight = batch.weight.clone()
        weight[:, 0] = 0  # before the first forward pass there is no state
        return weight

    def logq(self, net: Net, batch: Batch) -> Tensor:
        first = self.depth_logq(net, batch, 0)
        return torch.cat([torch.full_like(first[:, :1], -torch.inf), first], 1)

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        total, weights, figures = torch.zeros(()), 0.0, {}
        for k in range(min(self.options.depth, batch.tokens.shape[1] - 1)):
            logp, logq = batch.logp[:, 1 + k :], self.depth_logq(net, batch, k).float()
            weight = batch.weight[:, 1 + k :]
            total = total + DECAY**k * mean_over(self.divergence(logp, logq), weight)
            weights += DECAY**k
            accepted = mean_over(acceptance(logp, logq.detach()), weight)
            figures[f"acceptance {k}"] = accepted.item()
        return total / weights, figures

    def export(self, net: nn.Module, folder: Path) -> None:
        target = self.teacher.target
        facts = DrafterFacts.of(self.name, target, self.teacher.layers, self.arguments())
        write_drafter(folder, facts, dict(net.named_parameters()))

    def sampler(self, folder: Path) -> dict[str, Any]:
        return {
            "name": "speculative",
            "drafter": self.name,
            "drafter_weights": str(folder),
            "num_speculative_tokens": self.options.depth,
        }


class Medusa(_Heads):
    """A head for each depth, which reads no draft. Options: ``HeadOptions``."""

    name = "medusa"
    options_type = HeadOptions

    def network(self) -> nn.Module:
        return MedusaHeads(projection(self.teacher.target, self.name).float(), self.options.depth)


class Hydra(_Heads):
    """Heads that read the drafts before them. Options: ``HydraOptions``."""

    name = "hydra"
    options_type = HydraOptions

    def __init__(self, teacher: Teacher, options: HydraOptions):
        if options.trunk not in TRUNKS:
            raise unknown("trunk", options.trunk, TRUNKS, "--options")
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
        return hydra_of(self.arguments(), projection(self.teacher.target, self.name).float())
