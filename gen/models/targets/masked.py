"""MaskedTarget."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import MaskedModel
from gen.models.targets.base import StepOutput, Target


class MaskedTarget(Target):
    """The law of every place of a partly filled canvas. The canvas stands right behind each row's
    own condition: where those are of different lengths, the shorter ones are moved to the right,
    and nothing is seen or counted in front of them.
    """

    model: MaskedModel

    @property
    def replaces(self) -> bool:
        return self._even or getattr(
            self.model, "ragged", False
        )  # else whoever comes may have a condition that does not fit in

    def predict(self, canvas: Tensor, of: Tensor | None = None) -> StepOutput:
        """Compute the distributions of a canvas [B, T].

        Args:
            canvas: long [B, T], or [n, T] with ``of``.
            of: long [n], the rows whose prompts the n canvases have; None means one for each row.

        Raises:
            GenError: for prompts of different lengths where the model takes one length only.
        """
        prompt, left_padding, ragged = self._aligned()
        if of is not None:
            both = torch.cat([of + half * self.rows for half in range(self.branches)])
            prompt, left_padding = prompt[both], left_padding[both]
        canvas = canvas.repeat(self.branches, 1)
        extra, positions = (), (prompt.shape[1] + canvas.shape[1]) * self.branches
        if ragged:
            positions = positions - left_padding.view(self.branches, -1).sum(0)
            column = torch.arange(prompt.shape[1], device=self.device)
            prompt = torch.where(
                column < left_padding[:, None], canvas[:, :1], prompt
            )  # padding may be any number; this is some id
            extra = (left_padding,)
        ids = torch.cat([prompt, canvas], 1)
        logits = self.model.forward(ids, canvas.shape[1], *extra)
        logprobs = self._law(logits, self.legal if self._narrow else None)
        return StepOutput(logprobs, positions, raw=lambda: self._raw(logits, self.legal))

    def _aligned(self) -> tuple[Tensor, Tensor, bool]:
        """The conditions [H B, P] moved to the right, P the longest of them, the columns in front
        of each [H B], and whether there are any."""
        lengths = self._lengths[self._numbers()]
        width, shortest = int(lengths.max()), int(lengths.min())
        left_padding = width - self.prompt_length
        if not shortest and getattr(self.model, "shift", 0):
            raise GenError(
                "a condition is empty; expected at least one id, at which this model says what"
                " comes first"
            )
        if shortest == width:
            return self.prompt[:, :width], left_padding, False
        if not getattr(self.model, "ragged", False):
            raise GenError(
                f"the conditions have lengths from {shortest} to {width}; expected one length, all"
                " that this masked model takes"
            )
        at = torch.arange(width, device=self.device) - left_padding[:, None]
        return self.prompt.gather(1, at.clamp_min(0)), left_padding, True
