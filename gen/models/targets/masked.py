"""Target of masked models: the distribution of every position of a partly filled canvas."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import MaskedModel
from gen.models.targets.base import StepOutput, Target


class MaskedTarget(Target):
    """Masked model with the prompts of its items.

    The canvas stands right behind each row's own prompt: prompts that are shorter than the longest
    one of the batch are moved to the right, and the padding in front of them is neither attended to
    nor counted.
    """

    model: MaskedModel

    @property
    def replaces(self) -> bool:
        """True where rows can take other items: the prompt of a waiting item must fit in."""
        return self.prompts.has_one_length or self._takes_padding

    @property
    def _takes_padding(self) -> bool:
        return self.model.ragged

    def predict(self, canvas: Tensor, rows: Tensor | None = None) -> StepOutput:
        """Run one forward pass.

        Args:
            canvas: tokens long [n, T].
            rows: rows whose prompts the canvases have, long [n]; None means one canvas per row.

        Returns:
            Log-probabilities [n, T, V] of all positions.

        Raises:
            GenError: the prompts have several lengths and the model takes one length only.
        """
        legal = self._allowed(canvas)
        prompt, left_padding, is_padded = self._aligned()
        if rows is not None:
            branch_rows = torch.cat([rows + branch * self.rows for branch in range(self.branches)])
            prompt, left_padding = prompt[branch_rows], left_padding[branch_rows]
        canvas = canvas.repeat(self.branches, 1)
        num_positions = (prompt.shape[1] + canvas.shape[1]) * self.branches
        extra, num_computed = (), num_positions
        if is_padded:
            num_computed = num_computed - left_padding.view(self.branches, -1).sum(0)
            column = torch.arange(prompt.shape[1], device=self.device)
            # padding may be any number; the network needs a token id
            prompt = torch.where(column < left_padding[:, None], canvas[:, :1], prompt)
            extra = (left_padding,)
        tokens = torch.cat([prompt, canvas], 1)
        logits = self.model.forward(tokens, canvas.shape[1], *extra)
        logprobs = self._logprobs(logits, legal if self._narrow else None)
        return StepOutput(
            logprobs,
            num_computed,
            num_positions,
            raw=lambda: self._raw(logits, legal),
            under=self._under(logits),
        )

    def _allowed(self, canvas: Tensor) -> Tensor:
        """Find the tokens that may stand at each position of canvases [n, T]: bool [(n,) T, V]."""
        states = self.canvases(canvas)
        return self.legal if states is None else states.allowed()

    def _aligned(self) -> tuple[Tensor, Tensor, bool]:
        """Move the prompts to the right.

        Returns:
            Prompts [H B, P] with P the longest of them, columns of padding in front of each [H B],
            and whether there are any.
        """
        lengths = self.prompts.host_lengths[self.prompts.branch_items()]
        width, shortest = int(lengths.max()), int(lengths.min())
        left_padding = width - self.prompt_length
        if not shortest and self.model.shift:
            raise GenError(
                "a prompt is empty; expected at least one token, since this model predicts the"
                " first position at the token before it"
            )
        if shortest == width:
            return self.prompt[:, :width], left_padding, False
        if not self._takes_padding:
            raise GenError(
                f"the prompts have {shortest} to {width} tokens; expected one length, all that"
                " this masked model takes"
            )
        column = torch.arange(width, device=self.device) - left_padding[:, None]
        return self.prompt.gather(1, column.clamp_min(0)), left_padding, True
