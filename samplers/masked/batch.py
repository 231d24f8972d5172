"""Batch of a masked loop: canvases of all items and the rows that are being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.samplers.engine.failed import first_failed, refuse_failed
from gen.samplers.engine.rows import BatchSlots, RowStore
from gen.samplers.masked.constrained import check_completable


@dataclass
class CanvasBatch:
    """Canvases of N items, b of which are rows of the target.

    Attributes:
        target: the target; its rows follow ``slots``.
        canvas: tokens or latents of all items, [N, T(, C)], changed by every step.
        prefilled: positions that the caller's canvas held, bool [N, T].
        num_masked: positions of each item that were masked at the start, long [N].
        slots: items of the rows.
        memory: state of the parts; its rows follow ``slots``.
        step_index: forward passes of each row so far, long [b].
        num_steps: forward passes of the batch so far.
    """

    target: Any
    canvas: Tensor
    prefilled: Tensor
    num_masked: Tensor
    slots: BatchSlots
    memory: RowStore
    step_index: Tensor
    num_steps: int = 0

    @property
    def rows(self) -> Tensor:
        """Items of the rows, long [b]."""
        return self.slots.rows

    @property
    def tokens(self) -> Tensor:
        """Canvases of the rows, a copy: [b, T(, C)]."""
        return self.canvas[self.slots.rows]

    @property
    def masked(self) -> Tensor:
        """Masked positions of the rows: bool [b, T]."""
        return self.target.space.is_masked(self.tokens)

    def retire(self, outcome: Tensor) -> None:
        """Count the step and free the rows that are done.

        The host waits for the device here, once per step.

        Args:
            outcome: what ``outcome_of`` returned.

        Raises:
            GenError: a position got a token of no distribution.
        """
        self.num_steps, self.step_index = self.num_steps + 1, self.step_index + 1
        done_here, position = outcome.cpu().numpy()
        refuse_failed(self.target, self.slots.items, position)
        change = self.slots.retire(done_here.astype(bool))
        if change is not None:
            self.step_index = change.follow(self.step_index, 0)


def outcome_of(done: Tensor, failed: Tensor) -> Tensor:
    """Join what the host reads of a step, long [2, b].

    Args:
        done: rows that are done, bool [b].
        failed: positions that got a token of no distribution, bool [b, T].
    """
    return torch.stack([done.long(), first_failed(failed)])


def begin_batch(target, canvas: Tensor | None, followers: Sequence = ()) -> CanvasBatch:
    """Copy the canvas, check it and give the first items a row.

    Args:
        target: target of the items.
        canvas: tokens or latents [N, T(, C)], masked where a token is to be generated; None
            means masked everywhere.
        followers: targets of the same items and row stores that follow the rows.

    Raises:
        GenError: the token space does not allow the canvas, or no filling completes it.
    """
    space, device = target.space, target.device
    canvas = (
        space.empty(target.items, device, target.model.dtype)
        if canvas is None
        else canvas.to(device).clone()
    )
    check_canvas(canvas, target.items, target.legal, space)
    check_completable(target, canvas)
    prefilled = ~space.is_masked(canvas)
    num_masked = (~prefilled).sum(1)
    memory = RowStore()
    slots = BatchSlots(target, (num_masked > 0).cpu().numpy(), (memory, *followers))
    step_index = torch.zeros_like(slots.rows)
    return CanvasBatch(target, canvas, prefilled, num_masked, slots, memory, step_index)


def report(batch: CanvasBatch, known: Tensor) -> dict[str, Any]:
    """Describe the batch after a step for a callback.

    Args:
        batch: the batch.
        known: positions whose token does not change any more, bool [N, T].
    """
    filled = ~batch.target.space.is_masked(batch.canvas)
    return {
        "step": batch.num_steps,
        "done": int(filled.sum()),
        "total": filled.numel(),
        "tokens": batch.canvas,
        "known": known,
    }


def check_canvas(canvas: Tensor, batch: int, legal: Tensor, space: TokenSpace) -> None:
    """Check the shape of a canvas and the tokens that it holds.

    Args:
        canvas: tokens or latents [N, T(, C)].
        batch: expected number of items N.
        legal: token ids that each position allows, bool [T, V].
        space: token space of the canvas.

    Raises:
        GenError: the canvas has another shape, or holds a token at a position that does not
            allow it.
    """
    shape = (batch, space.length, *([space.channels] if space.channels else []))
    if canvas.shape != shape:
        raise GenError(f"the canvas has shape {tuple(canvas.shape)}; expected {shape}")
    if space.channels:
        return
    known = ~space.is_masked(canvas)
    inside = (canvas >= 0) & (canvas < legal.shape[1])
    position = torch.arange(space.length, device=canvas.device)
    fine = legal[position, canvas.clamp(0, legal.shape[1] - 1)] & inside
    if space.eos_token_id is not None:
        # positions behind the eos token hold it too, also where it may not be drawn
        fine |= canvas == space.eos_token_id
    if bool((known & ~fine).any()):
        row, column = (known & ~fine).nonzero()[0].tolist()
        raise GenError(
            f"the canvas holds token id {int(canvas[row, column])} at position {column} of row"
            f" {row}; expected a token id that is legal at that position"
        )
