"""What a kind of drafter is to the recipe: a network, its loss over a batch, and a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gen.core.errors import unknown
from gen.core.lookup import legal_at
from gen.models.targets.identity import DrafterFacts
from gen.models.targets.trained_drafters import write_drafter
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.losses import LOSSES, Divergence, acceptance, mean_over

Net = Callable[..., Any]  # a network, or its forward with weights in another dtype


@dataclass(frozen=True)
class Options:
    """Options that all kinds have; a kind adds its own.

    Attributes:
        loss: name of the divergence (``gen.recipes.drafters.losses``).
        lr: peak learning rate.
        batch: sequences per step.
    """

    loss: str = "nla_fkl"
    lr: float = 2e-3
    batch: int = 32


@dataclass(frozen=True)
class DepthOptions(Options):
    """Options of kinds that are trained for a number of drafts in a row, which is then the
    sampler's.

    Attributes:
        depth: drafts in a row.
    """

    depth: int = 4


class Kind(ABC):
    """A kind of drafter for one model.

    A drafter of a folder with the weights of one network and the name of the kind needs no
    ``export`` and no ``sampler`` of its own.

    Attributes:
        name: name on the command line.
        options_type: dataclass of the options.
        num_drafts: drafts in a row of sequences that the drafter itself goes on with; 0 for a kind
            that trains on the target's sequences alone.
        muon: matrices that Muon trains have this in their name; empty for none.
        is_model: whether the drafter is a model over the tokens, which Jacobi windows can begin
            with.

    Args:
        teacher: the model with some prompts.
        options: options of the kind.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]] = Options
    num_drafts: ClassVar[int] = 0
    muon: ClassVar[str] = ""
    is_model: ClassVar[bool] = False

    def __init__(self, teacher: Teacher, options: Any):
        if options.loss not in LOSSES:
            raise unknown("loss", options.loss, LOSSES, "--options")
        self.divergence: Divergence = LOSSES[options.loss]
        self.options = options
        self.teacher = teacher.with_layers(self.layers(teacher))

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        """Return the layers of the target whose hidden states the drafter reads."""
        return ()

    @abstractmethod
    def network(self) -> nn.Module:
        """Make the network to train, in float32."""

    @abstractmethod
    def logq(self, net: Net, batch: Batch) -> Tensor:
        """Return the distribution of the first draft at every position.

        Args:
            net: the network.
            batch: sequences.

        Returns:
            Log-probabilities [B, T, V]; those where ``batch.weight`` is 0, or where the drafter
            cannot stand (``usable``), are not read.
        """

    def usable(self, batch: Batch) -> Tensor:
        """Return the weights [B, T] of positions that a first draft can have."""
        return batch.weight

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch, and figures to log."""
        logq, weight = self.logq(net, batch).float(), self.usable(batch)
        loss = mean_over(self.divergence(batch.logp, logq), weight)
        accepted = mean_over(acceptance(batch.logp, logq.detach()), weight)
        return loss, {"acceptance": accepted.item()}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the network, which a folder states."""
        return {}

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a trained network that a folder holds, by name."""
        return dict(net.named_parameters())

    def export(self, net: nn.Module, folder: Path) -> None:
        """Write the folder that a sampler reads."""
        target = self.teacher.target
        facts = DrafterFacts.of(self.name, target, self.teacher.layers, self.arguments())
        write_drafter(folder, facts, self.weights(net))

    def sampler(self, folder: Path) -> dict[str, Any]:
        """Return the spec of a sampler that drafts with a folder."""
        spec = {"name": "speculative", "drafter": self.name, "drafter_weights": str(folder)}
        if isinstance(self.options, DepthOptions):
            spec["num_speculative_tokens"] = self.options.depth
        return spec

    def initialiser(self, folder: Path) -> dict[str, Any]:
        """Return the spec of Jacobi decoding whose windows begin with the drafts of a folder, for a
        kind that ``is_model``."""
        chosen = {"drafter", "drafter_weights", "draft_model"}
        params = {k: v for k, v in self.sampler(folder).items() if k in chosen}
        return {"name": "speculative_jacobi", "init": "model", **params}

    def logprobs(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Turn a drafter's logits into log-probabilities under temperature and allowed tokens.

        Guidance and filters are left to training: the drafter's own distribution learns them.

        Args:
            logits: [B, L, V'] with V' at least the V tokens of the target.
            positions: grid positions, long [B, L].
        """
        target = self.teacher.target
        legal, sampling = target.legal, target.sampling
        z = logits[..., : legal.shape[-1]].float()
        z = z if sampling.is_greedy else z / sampling.temperature
        allowed = legal_at(legal, positions.clamp_max(target.length - 1))
        return torch.where(allowed, z, -torch.inf).log_softmax(-1)

    def positions(self, batch: Batch) -> Tensor:
        """Return the grid positions of a batch's tokens, long [B, T]."""
        return torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(
            batch.tokens
        )
