"""Targets of block models: the positions of one block in parallel, given all blocks before it.

A block is the whole canvas of a masked sampler (``BlockTarget.block``). Committed tokens enter the
cache with the first forward pass of the next block, so that finished blocks are never computed
again and cost no forward pass of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import BlockModel
from gen.models.targets.base import StepOutput
from gen.models.targets.canvas_rule import AnyOrderTarget, CanvasStates


class BlockTarget(AnyOrderTarget):
    """Target of a block given the blocks before it.

    All rows are in the same block, so that none can take another item. ``known`` is the number of
    final positions in finished blocks.
    """

    model: BlockModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.block_length = self.model.block_length
        if not self.block_length or self.length % self.block_length:
            raise GenError(
                f"the model's blocks are of {self.block_length} positions; expected a divisor"
                f" of the {self.length} of the grid"
            )
        shortest, longest = int(self.prompt_length.min()), self.prompt.shape[1]
        if shortest != longest:
            raise GenError(
                f"the conditions have lengths from {shortest} to {longest}; expected one length for"
                " a sampler of blocks, or a masked sampler"
            )
        self.cache = self.model.new_cache(self.prompt.shape[1] + self.length)
        self.known = 0
        self.committed = self.prompt[: self.rows, :0]  # tokens of finished blocks, long [B, known]
        self._waiting = (
            self.prompt
        )  # ids that the cache does not hold yet, and the position of the first of them
        self._waiting_from = 0

    def commit(self, tokens: Tensor) -> None:
        """Commit the tokens of the next positions [B, n], a whole number of blocks."""
        self._waiting = torch.cat([self._waiting, tokens.repeat(self.branches, 1)], 1)
        self.committed = torch.cat([self.committed, tokens], 1)
        self.known += tokens.shape[1]

    def block(self) -> Block:
        """Return the target of the next block."""
        return Block(self)

    def predict(self, canvas: Tensor) -> StepOutput:
        """Run the network on the block's canvas [B, L], with blocks that the cache lacks."""
        width, prefix = canvas.shape[1], self.prompt.shape[1]
        ids = torch.cat([self._waiting, canvas.repeat(self.branches, 1)], 1)
        at = torch.arange(self._waiting_from, self._waiting_from + ids.shape[1], device=self.device)
        block = (
            (at - prefix).div(self.block_length, rounding_mode="floor").clamp_min(-1)
        )  # the condition is one before the first
        last = prefix + (block + 1) * self.block_length - 1
        logits = self.model.forward(
            ids, at.expand(len(ids), -1), last.expand(len(ids), -1), self.cache
        )[:, -width:]
        self._waiting_from, self._waiting = (
            self._waiting_from + self._waiting.shape[1],
            self._waiting[:, :0],
        )
        legal = self.legal[self.known : self.known + width]
        if self.canvas_rule is not None:
            masked = self.space.is_masked(canvas)
            legal = CanvasStates(self.canvas_rule, canvas, masked, self.committed).allowed()
        return StepOutput(
            self._logprobs(logits, legal),
            ids.shape[1] * self.branches,
            ids.shape[1] * self.branches,
            raw=lambda: self._raw(logits, legal),
            under=self._under(logits),
        )


class Block:
    """Target of a masked sampler that is one block."""

    def __init__(self, parent: BlockTarget):
        self.parent, self.model, self.device = parent, parent.model, parent.device
        self.items = self.rows = parent.rows
        self.name, self.branches, self.sampling = parent.name, parent.branches, parent.sampling
        self.canvas_rule = parent.canvas_rule
        self.offset = parent.offset + parent.known
        self.length = parent.block_length
        self.legal = parent.legal[parent.known : parent.known + self.length]
        space = parent.space
        inner = (
            space.grid[1:] if torch.Size(space.grid[1:]).numel() == self.length else (self.length,)
        )
        self.space = replace(
            space,
            grid=inner,
            legal=space.legal[parent.known : parent.known + self.length],
            eos_token_id=None,
        )  # an end is one of the positions' ids
        self._at = torch.arange(parent.rows, device=parent.device)
        # positions that were computed for rows that wait for the others, long [rows of the parent]
        self.num_idle_positions = torch.zeros_like(self._at)

    @property
    def num_prompt_tokens(self) -> Tensor:
        """Zero per row, long [b]: blocks are not counted from the prompt."""
        return torch.zeros(self.rows, dtype=torch.long, device=self.device)

    def canvases(self, canvas: Tensor) -> CanvasStates | None:
        """Look at the canvases of the rows left, [b, L]; see ``Target.canvases``.

        The positions of later blocks are masked.
        """
        if self.canvas_rule is None:
            return None
        before = self.parent.committed[self._at]
        return CanvasStates(self.canvas_rule, canvas, self.space.is_masked(canvas), before)

    def prepare(self, step: Any) -> None:
        """Do nothing: see ``Target.prepare``."""

    def predict(self, canvas: Tensor) -> StepOutput:
        """Run the network for the rows left, canvas [b, L].

        Rows that were dropped are computed along: they come back in the next block.
        """
        whole = torch.full(
            (self.parent.rows, self.length), self.space.mask_token_id, device=self.device
        )
        whole[self._at] = canvas
        output, rows = self.parent.predict(whole), self._at
        raw, under = output.raw, output.under
        idle = torch.full_like(self.num_idle_positions, output.num_computed_positions)
        self.num_idle_positions += idle.index_fill_(0, rows, 0)
        return replace(
            output,
            logprobs=output.logprobs[rows],
            raw=None if raw is None else lambda: raw()[rows],
            under=None if under is None else lambda at, *rest: under(rows[at], *rest),
        )

    def keep(self, rows: Tensor) -> None:
        self._at = self._at[rows]
        self.rows = len(self._at)
