"""Base class of adapters: networks seen through the model protocols."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from gen.core.errors import GenError


class ModelAdapter:
    """Base class of adapters.

    Attributes:
        model: the network.
        features: features of each distinct condition of the batch.
        keeps: a causal model takes ``keep=n``: logits of the last n tokens alone.
        superposes: a causal model takes weighted sums of embeddings as inputs
            (``gen.models.adapters.protocols.SuperposedModel``).
        ragged: a masked model takes prompts of several lengths, with padding on the left.
        shift: logits of a masked model at position i are about position i + ``shift``.
        max_positions: positions that the model was made for; None where there is no such number.
        counts_known: a masked model of latents takes the positions known after a step.
    """

    model: torch.nn.Module
    keeps: bool = False
    superposes: bool = False
    ragged: bool = False
    shift: int = 0
    max_positions: int | None = None
    counts_known: bool = False
    features: Sequence[dict[str, Tensor]] = ()

    def condition_token(self, number: int) -> int:
        """Return the token id at the prompt positions of a condition with features.

        Raises:
            GenError: the model takes conditions as token ids alone.
        """
        raise GenError(
            f"the condition has features, and {type(self).__name__} takes only token ids"
        )

    def conditioned(self, features: Sequence[dict[str, Tensor]]) -> Self:
        """Return the adapter of the same network with the features of a batch's conditions."""
        other = copy.copy(self)
        other.features = features
        return other

    def network_changed(self) -> None:
        """Take note that layers of the network have other weights than before."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())
