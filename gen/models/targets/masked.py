"""Target of masked models: the distribution of every position of a partly filled canvas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import AdjustableModel, MaskedModel
from gen.models.targets.base import StepOutput, Target
from gen.models.targets.canvas_rule import AnyOrderTarget
from gen.models.targets.hidden import AdjustableCanvas, AdjustableOutput


class MaskedTarget(AnyOrderTarget):
    """Masked model with the prompts of its items.

    The canvas stands right behind each row's own prompt: prompts that are shorter than the longest
    one of the batch are moved to the right, and the padding in front of them is neither attended to
    nor counted.
    """

    model: MaskedModel
    _gives_states = False
    _moved: list[Tensor] | None = None  # what ``_aligned`` made of the rows' prompts

    def require_states(self, digest: str, method: str) -> None:
        """Return the hidden states behind canvases from now on (``AdjustableOutput``).

        Args:
            digest: digest of the weights that the method was trained for; empty for any.
            method: method that reads them, for messages.

        Raises:
            GenError: the model gives none, or has other weights.
        """
        if not isinstance(self.model, AdjustableModel):
            raise GenError(
                f"{method} reads hidden states, and {type(self.model).__name__} gives logits alone;"
                " expected a masked model with forward_with_states"
            )
        here = self.model.digest
        if digest and digest != here:
            raise GenError(
                f"{method} was trained for a model with weights {digest}; expected {here}"
                f" ({self.name or 'the model'})"
            )
        self._gives_states = True

    @property
    def replaces(self) -> bool:
        """True where rows can take other items: the prompt of a waiting item must fit in."""
        return self.prompts.has_one_length or self._takes_padding

    @property
    def opens(self) -> bool:
        """True if items can be given prompts later (``Target.put``)."""
        return self.replaces

    def takes(self, other: Target) -> bool:
        """See ``Target.takes``; a model without padding takes prompts of one length."""
        lengths = self.prompts.host_lengths[:1], other.prompts.host_lengths
        return super().takes(other) and (
            self._takes_padding or bool((lengths[0] == lengths[1]).all())
        )

    @property
    def _takes_padding(self) -> bool:
        return self.model.ragged

    @property
    def captures(self) -> bool:
        """True where ``predict`` without rows is a function of the canvas and ``row_inputs``, which
        reads no value on the host."""
        differs = self.item_sampling is not None or self.router is not None
        return not differs and self.canvas_rule is None and not self._gives_states

    @property
    def row_inputs(self) -> list[Tensor]:
        """What a pass reads of the rows: lengths of prompts [H B], prompts moved to the right
        [H B, P], and columns of padding in front of each [H B], where there are any."""
        if self._moved is None:
            prompt, left_padding, is_padded = self._aligned()
            self._moved = [prompt, left_padding] if is_padded else [prompt]
        return [self.prompts.lengths, *self._moved]

    @row_inputs.setter
    def row_inputs(self, tensors: Sequence[Tensor]) -> None:
        self.prompts.lengths, *self._moved = tensors

    def keep(self, rows: Tensor) -> None:
        """See ``Target.keep``."""
        super().keep(rows)
        self._moved = None

    def _follow_items(self) -> None:
        self._moved = None

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
        _, prompt, *padding = self.row_inputs
        if rows is not None:
            branch_rows = torch.cat([rows + branch * self.rows for branch in range(self.branches)])
            prompt, *padding = (x[branch_rows] for x in (prompt, *padding))
        canvas = canvas.repeat(self.branches, 1)
        num_positions = num_computed = (prompt.shape[1] + canvas.shape[1]) * self.branches
        if padding:
            (left_padding,) = padding
            num_computed = num_computed - left_padding.view(self.branches, -1).sum(0)
            column = torch.arange(prompt.shape[1], device=self.device)
            # padding may be any number; the network needs a token id
            prompt = torch.where(column < left_padding[:, None], canvas[:, :1], prompt)
        tokens = torch.cat([prompt, canvas], 1)
        states: AdjustableCanvas | None = None
        if self._gives_states:
            logits, states = self._with_states(tokens, prompt.shape[1], *padding)
        else:
            logits = self.model.forward(tokens, canvas.shape[1], *padding)
        logprobs = self._logprobs(logits, legal if self._narrow else None)
        return AdjustableOutput(
            logprobs,
            num_computed,
            num_positions,
            raw=lambda: self._raw(logits, legal),
            under=self._under(logits),
            states=states,
        )

    def _with_states(
        self, tokens: Tensor, prefix: int, left_padding: Tensor | None = None
    ) -> tuple[Tensor, AdjustableCanvas]:
        """Run the model on columns [H n, P + T]; return logits [H n, T, V] and hidden states."""
        model, length = cast(AdjustableModel, self.model), tokens.shape[1] - prefix
        more = () if left_padding is None else (left_padding,)
        logits, hidden = model.forward_with_states(tokens, length, *more)
        if model.shift:  # states at a column are about the next one
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
        at, seen = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens), None
        if left_padding is not None:
            seen = at >= left_padding[:, None]
            at = (at - left_padding[:, None]).clamp_min(0)
        branches, prompt = self.branches, tokens[:, :prefix]
        states = AdjustableCanvas(model, branches, prompt, hidden, at, seen, self._shaped)
        return logits, states

    def _shaped(self, logits: Tensor, canvas: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Make final log-probabilities [n, T, V] of logits [H n, T, V] of canvases [n, T], and a
        function that returns the model's own."""
        legal = self._allowed(canvas)
        logprobs = self._logprobs(logits, legal if self._narrow else None)
        return logprobs, lambda: self._raw(logits, legal)

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
