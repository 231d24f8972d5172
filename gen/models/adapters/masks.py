"""Masks of attention.

A rule says which slots a query sees. Where query i of all rows sees slots 0 .. i and there are no
others, the mask is ``CAUSAL``, which takes no memory: attention knows that rule. Any other mask is
either what is added to scores, [B, 1, L, S], or for ``flex_attention`` a ``BlockMask``: the rule as
a function of a query and a slot, and a table of the blocks of queries and slots in which it holds
anywhere or everywhere, without a tensor of [L, S].

Layers that see a window alone (``gen.models.adapters.windows``) have a mask of their own, which
also hides the slots before the first one that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Causal:
    """Mask of queries that see all slots up to their own, of as many slots as queries."""


CAUSAL = Causal()
Mask = Tensor | BlockMask | Causal
LayerMasks = Mask | dict[str, Mask]  # one for all layers, or one for each kind of layer
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of row, head, query and slot: bool
BLOCK = 128  # queries and slots of a block


def hide(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a mask to add to scores: the smallest number where ``hidden`` (bool), 0 elsewhere."""
    return hidden.to(dtype) * torch.finfo(dtype).min


def branches(parents: Tensor) -> Tensor:
    """Return whether draft j is draft i or one before it on its branch, bool [B, D, D].

    Args:
        parents: draft that each draft follows, long [B, D], -1 for the root.
    """
    batch, drafts = parents.shape
    column = torch.arange(drafts, device=parents.device)
    row = torch.arange(batch, device=parents.device)
    on_branch = torch.zeros(batch, drafts, drafts, dtype=torch.bool, device=parents.device)
    for i in range(drafts):
        parent = parents[:, i]
        above = on_branch[row, parent.clamp_min(0)]
        on_branch[:, i] = (above & (parent >= 0)[:, None]) | (column == i)
    return on_branch


def blocks_up_to(last: Tensor, slots: int, first: Tensor | None = None) -> BlockMask:
    """Let each query see the slots up to its last one.

    Args:
        last: last slot that a query sees, long [B, L].
        slots: number of slots.
        first: first slot that a query sees, long [B, L]; None is slot 0.
    """
    # one tensor, since kernels of a CPU take no second one; no constant indices, which compilers
    # of kernels fail at
    width = last.shape[1]
    ends = last if first is None else torch.cat([last, first], 1)

    def rule(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        before = slot <= ends[row, query]
        return before if first is None else before & (slot >= ends[row, query + width])

    most, least = _of_blocks(last, slots)
    start, end = _bounds(slots, last.device)
    some, whole = start <= most[..., None], end <= least[..., None] + 1
    if first is not None:
        some, whole = _after(first, slots, some, whole)
    return _block_mask(rule, some, whole, width, slots)


def blocks_among(seen: Tensor, width: int) -> BlockMask:
    """Let all queries of a row see the same slots.

    Args:
        seen: which slots, bool [B, S].
        width: number of queries of a row.
    """

    def rule(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return seen[row, slot]

    slots = seen.shape[1]
    blocks = F.pad(seen, (0, -slots % BLOCK)).unflatten(1, (-1, BLOCK))
    shape = (-1, -(-width // BLOCK), -1)
    some, whole = (x[:, None].expand(shape) for x in (blocks.any(-1), blocks.all(-1)))
    return _block_mask(rule, some, whole, width, slots)


def blocks_of_tree(
    root: Tensor, on_branch: Tensor, positions: int, slots: int, first: Tensor | None = None
) -> BlockMask:
    """Let the queries of a tree see the slots up to its root and those of their branches.

    Args:
        root: slot of the root, which is the first query, long [B].
        on_branch: whether draft i sees draft j, which it stands on or is, bool [B, D, D].
        positions: number of slots before those of the drafts.
        slots: number of slots.
        first: first slot before those of the drafts that a query sees, long [B, 1 + D]; None is
            slot 0.
    """
    drafts = on_branch.shape[1]
    width = 1 + drafts
    # Columns: the root's slot, then the number of slots for a draft that is seen, else -1. The root
    # sees no draft, and nothing sees a slot behind the last draft. Rows of first slots, which are
    # before all drafts, follow those of the queries: one tensor, since kernels of a CPU take no
    # second one.
    seen = F.pad(torch.where(on_branch, slots, -1), (1, 1, 1, 0), value=-1)
    seen[..., 0] = root[:, None]
    if first is not None:
        seen = torch.cat([seen, first[..., None].expand_as(seen)], 1)

    def rule(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        column = (slot - positions + 1).clamp(0, drafts + 1)
        before = slot <= seen[row, query, column]
        return before if first is None else before & (slot >= seen[row, query + width, column])

    start, end = _bounds(slots, root.device)
    some = (start <= root[:, None, None]) | ((end > positions) & (start < positions + drafts))
    whole = end <= root.clamp_max(positions - 1)[:, None, None] + 1
    shape = (-1, -(-width // BLOCK), -1)
    some, whole = some.expand(shape), whole.expand(shape)
    if first is not None:
        some, whole = _after(first, slots, some, whole)
    return _block_mask(rule, some, whole, width, slots)


def _after(first: Tensor, slots: int, some: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Take the blocks before the first slots that queries see, long [B, L], out of tables of
    blocks, bool [B, L / block, S / block]."""
    most, least = _of_blocks(first, slots)
    start, end = _bounds(slots, first.device)
    return some & (end > least[..., None]), whole & (start >= most[..., None])


def _of_blocks(last: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return the largest and smallest of a block of queries, long [B, L / block]."""
    more = -last.shape[1] % BLOCK
    most, least = (F.pad(last, (0, more), value=x).unflatten(1, (-1, BLOCK)) for x in (-1, slots))
    return most.amax(-1), least.amin(-1)


def _bounds(slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first slot of each block and its end, long [S / block]."""
    first = torch.arange(0, slots, BLOCK, device=device)
    return first, first + BLOCK


def _block_mask(rule: Rule, some: Tensor, whole: Tensor, queries: int, slots: int) -> BlockMask:
    """Make a mask of a rule and of the blocks where it holds somewhere and everywhere, bool
    [B, L / block, S / block]."""

    def table(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()

    return BlockMask.from_kv_blocks(
        *table(some & ~whole),
        *table(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(queries, slots),
        compute_q_blocks=False,
    )
