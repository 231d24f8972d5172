"""Hidden states behind canvases of a masked model, from which a layer makes new distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gen.models.adapters.protocols import AdjustableModel
from gen.models.targets.base import StepOutput

# logits [H n, T, V] and canvases [n, T] -> final log-probabilities [n, T, V], and a function that
# returns those without temperature and filters
Shaping = Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], Tensor]]]


@dataclass(frozen=True)
class AdjustableCanvas:
    """Hidden states of n canvases, in all H branches of classifier-free guidance.

    Attributes:
        model: the masked model.
        branches: H.
        prompt: columns before the canvas, long [H n, P].
        hidden: hidden states about each column, [H n, P + T, D].
        positions: position of each column, long [H n, P + T].
        seen: columns that are no padding, bool [H n, P + T]; None where all are.
        shaping: makes log-probabilities.
    """

    model: AdjustableModel
    branches: int
    prompt: Tensor
    hidden: Tensor
    positions: Tensor
    seen: Tensor | None
    shaping: Shaping

    def adjusted(self, layer: Callable[..., Tensor], canvas: Tensor) -> Self:
        """Return the hidden states after a layer that reads canvases, long [n, T].

        Args:
            layer: makes hidden states [H n, S, D] of embeddings and hidden states [H n, S, D],
                positions long [H n, S] and seen columns.
            canvas: long [n, T].
        """
        tokens = torch.cat([self.prompt, canvas.repeat(self.branches, 1)], 1)
        embedded = self.model.embedded(tokens, self.positions)
        return replace(self, hidden=layer(embedded, self.hidden, self.positions, self.seen))

    def logprobs(self, canvas: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Make final log-probabilities [n, T, V] of these states.

        Args:
            canvas: long [n, T], which decides the tokens that a constraint allows.

        Returns:
            They, and a function that returns those without temperature and filters.
        """
        logits = self.model.logits_of(self.hidden[:, -canvas.shape[1] :])
        return self.shaping(logits, canvas)

    def of_rows(self, rows: Tensor) -> Self:
        """Return the states of some canvases, long [m]."""
        count = len(self.hidden) // self.branches
        index = torch.cat([rows + branch * count for branch in range(self.branches)])
        return replace(
            self,
            prompt=self.prompt[index],
            hidden=self.hidden[index],
            positions=self.positions[index],
            seen=None if self.seen is None else self.seen[index],
        )


@dataclass
class AdjustableOutput(StepOutput):
    """Outcome of a forward pass with the hidden states behind it.

    Attributes:
        states: hidden states of the canvases.
    """

    states: AdjustableCanvas | None = None
