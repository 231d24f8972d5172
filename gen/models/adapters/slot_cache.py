"""A key-value cache whose slot is the absolute position.

Rows of a batch stand at different positions, drafts are rejected, windows slide: with one slot per
position all of that is the same operation. New keys and values are written to the slots of their
positions; a slot above a query's own position is never attended to, and by the time a query passes
it, it has been written again. So a rejected draft needs no rollback, no crop and no gather.

Models that look both ways use the same slots with another mask (``among``): which slots may be seen
is said slot by slot.

Layers that see a window of the positions before a query have a mask of their own
(``SlotCache.windows``). Their slots are kept all the same, since drafts before a window's end may
be rejected and rows stand at different positions: the memory is that of layers that see everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.models.adapters.lead import mirrored
from gen.models.adapters.masks import (
    CAUSAL,
    LayerMasks,
    Mask,
    blocks_among,
    blocks_of_tree,
    blocks_up_to,
    branches,
    hide,
)
from gen.models.adapters.protocols import ModelCache
from gen.models.adapters.windows import Window, Windows, narrowest
from gen.models.load.transformers_compat import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Buffers of one layer: keys and values [B, S, H, D], B rows and S slots."""

    def __init__(self, owner: SlotCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states.transpose(1, 2), value_states.transpose(1, 2))

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        rows = len(keys) if self.owner.rows is None else self.owner.num_rows or len(keys)

        def make(x):
            slots = self.owner.slots + self.owner._branch_slots
            return x.new_zeros(rows, slots, *x.shape[2:])

        self.keys, self.values, self.is_initialized = make(keys), make(values), True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write as ``write`` does, in transformers' order of axes: [B, H, L, D]."""
        keys, values = self.write(key_states.transpose(1, 2), value_states.transpose(1, 2))
        return keys.transpose(-3, -2), values.transpose(-3, -2)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write as ``put`` does; return all slots in use, of the owner's rows."""
        self.put(keys, values)
        return self.read()

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Write [B, L, H, D] to the owner's positions."""
        if not self.is_initialized:
            self._allocate(keys, values)
        owner, here = self.owner, keys.device  # layers of one model may lie on several devices
        some = None if owner.rows is None else owner.rows.to(here)
        if owner.span is not None and some is None:  # a slice is cheaper than indices
            self.keys[:, slice(*owner.span)], self.values[:, slice(*owner.span)] = keys, values
        else:
            at = (
                (torch.arange(len(keys), device=here) if some is None else some)[:, None],
                owner.positions.to(here),
            )
            self.keys[at], self.values[at] = keys, values

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all slots in use, of the owner's rows."""
        return self.owner.in_use(self.keys), self.owner.in_use(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.used, 0

    def get_seq_length(self) -> int:
        return self.owner.used

    def get_max_length(self) -> int:
        return self.owner.slots


class SlotCache(Cache, ModelCache):
    """``layers`` buffers of ``slots`` positions each; ``at`` or ``among`` before every forward
    call. The first call brings all rows along.

    On a CPU a call reads no further than the highest slot in use. Elsewhere it reads all of them:
    to know which is the highest, the device would have to be waited for, and the shapes would
    change from call to call.
    """

    has_slots = True

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of a call's first token where all rows stand there."""
        return self.used if self.span is None else self.span[0]

    def __init__(self, layers: int, slots: int):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.slots, self.used = slots, 0
        self.positions: Tensor | None = None
        self.rows: Tensor | None = None  # of the cache, those that the call is about, if not all
        # the slots of the call, first and end, where they are the same in a row in all rows
        self.span: tuple[int, int] | None = None
        self._chosen: Tensor | None = None
        self._reach = 0  # slots of positions in use, without those of branches
        self._branch_slots = 0  # slots above those of positions, for the drafts of a tree
        self._root: Tensor | None = None  # slot of the last tree's root, long [B]
        # whether all slots are read in every call, whatever the device: shapes stay the same then
        self.whole = False
        # whether masks are block masks (``ModelAdapter.takes_block_masks``)
        self.block_masks = False
        # kinds of layers, by which a call has several masks; none where all layers see all slots
        self.windows: Windows = {}
        self.tables: Any = (
            None  # what a forward made of the slots once (``gen.models.adapters.fast_llama``)
        )
        self._notes: dict[str, int] = {}  # numbers of the layers that hold notes

    def at(self, positions: Tensor, dtype: torch.dtype, last: Tensor | None = None) -> LayerMasks:
        """Says where the next call's tokens stand (long [B, L]) and returns its mask, float [B, 1,
        L, used]: 0 for slots up to the query's own position, or up to ``last`` [B, L] (the end of
        its block), the smallest number above. With ``block_masks`` it is a block mask that says
        the same. With several kinds of layers (``windows``) it is a mask for each kind, which also
        hides the slots before the window of the query's own position.
        """
        self._stand(positions, None)
        self._read_to(positions if last is None else last)
        return self._above(positions, positions if last is None else last, dtype)

    def needed(self, positions: Tensor, dtype: torch.dtype) -> LayerMasks | None:
        """Announce a call as ``at`` does, but return None where nothing is hidden, and ``CAUSAL``
        where the tokens are the first of all rows, as long as no window ends before them. Where
        the device is no CPU, the host does not know either of it."""
        self._stand(positions, None)
        if self.span is None:
            self._read_to(positions)
            return self._above(positions, positions, dtype)
        first, self.used = self.span  # of all rows
        if self.used > (narrowest(self.windows) or self.used):
            return self._above(positions, positions, dtype)
        if positions.shape[1] == 1:
            return None
        return self._above(positions, positions, dtype) if first else CAUSAL

    def _by_kind(self, make: Callable[[Window | None], Mask]) -> LayerMasks:
        """Make the mask of every kind of layer of its window."""
        if not self.windows:
            return make(None)
        masks = {kind: make(window) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def in_use(self, buffer: Tensor) -> Tensor:
        """Return what a call reads of a layer's keys or values [B, S, H, D]."""
        picked = slice(None) if self.rows is None else self.rows.to(buffer.device)
        return buffer[picked, : self.used]

    def _read_to(self, last: Tensor) -> None:
        """Let a call read the slots up to the last one that any of its queries attends to, long
        [B, L]: rows that stood further on may have left."""
        if last.device.type == "cpu" and not self.whole:
            self.used = int(last.numpy().max()) + 1

    def _above(self, positions: Tensor, last: Tensor, dtype: torch.dtype) -> LayerMasks:
        """Hide the slots above ``last`` and those before the windows of ``positions``, [B, L]."""
        slot = torch.arange(self.used, device=last.device)

        def make(window: Window | None) -> Mask:
            first = None if window is None else window.first(positions)
            if self.block_masks:
                return blocks_up_to(last, self.used, first)
            hidden = slot > last[..., None]
            if first is not None:
                hidden |= slot < first[..., None]
            return hide(hidden, dtype)[:, None]

        return self._by_kind(make)

    def among(
        self, positions: Tensor, dtype: torch.dtype, seen: Tensor, rows: Tensor | None = None
    ) -> Mask:
        """Announce a call as ``at`` does, for tokens that may stand before what they see: 0 for the
        slots in ``seen`` (bool [B, slots]), the same for all tokens of a row. ``rows`` long [B]:
        the rows of the cache that these are, if not all. Padding a row by repeating one of its
        tokens with its position changes nothing."""
        self._stand(positions, rows)
        if self.block_masks:
            return blocks_among(seen[:, : self.used], positions.shape[1])
        return hide(~seen[:, : self.used], dtype)[:, None, None].expand(
            -1, -1, positions.shape[1], -1
        )

    def tree(self, positions: Tensor, parents: Tensor, dtype: torch.dtype) -> LayerMasks:
        """Announce a call with a tree of drafts and return its mask, as ``at`` does.

        The root goes to the slot of its position, draft j to branch slot ``slots + j``, above all
        positions: drafts of one depth share their position. A draft attends to everything up to
        the root, and to the branch it stands on; in layers with a window, to what of both is in
        the window of its position.

        Args:
            positions: absolute positions by depth, long [B, L]; column 0 is the root.
            parents: draft that each draft follows, long [B, L - 1], -1 for the root.
            dtype: type of the mask.
        """
        batch, drafts = parents.shape
        column = torch.arange(drafts, device=positions.device)
        slots = torch.cat([positions[:, :1], (self.slots + column).expand(batch, -1)], 1)
        self._stand(positions, None)
        reach = self._reach
        self._grow(self.slots + drafts)
        self.positions, self.span = slots, None
        # a graph reads the buffers as a whole, with branch slots of larger trees
        drafted = self._branch_slots if self.whole else drafts
        self.used, self._reach, self._root = self.slots + drafted, reach, positions[:, 0]
        return self._of_tree(positions, branches(parents), dtype)

    def _of_tree(self, positions: Tensor, branch: Tensor, dtype: torch.dtype) -> LayerMasks:
        """Make the masks of an announced tree.

        Args:
            positions: as of ``tree``, [B, L].
            branch: whether draft j is draft i or one before it on its branch, bool [B, D, D].
            dtype: type of the mask.
        """
        batch, drafts = branch.shape[:2]

        def make(window: Window | None) -> Mask:
            first = None if window is None else window.first(positions)
            on_branch = branch
            if first is not None:  # drafts at positions [B, 1, D], seen from those at [B, D, 1]
                on_branch = branch & (positions[:, None, 1:] >= first[:, 1:, None])
            if self.block_masks:
                return blocks_of_tree(positions[:, 0], on_branch, self.slots, self.used, first)
            slot = torch.arange(self.slots, device=positions.device)
            before = (slot <= positions[:, :1])[:, None]
            if first is not None:
                before = before & (slot >= first[..., None])
            shape = batch, 1 + drafts, self.used
            seen = torch.zeros(shape, dtype=torch.bool, device=positions.device)
            seen[..., : self.slots] = before
            seen[:, 1:, self.slots : self.slots + drafts] = on_branch
            return hide(~seen, dtype)[:, None]

        return self._by_kind(make)

    @mirrored
    def commit_path(self, nodes: Tensor, count: Tensor) -> None:
        """Copy accepted drafts of the last tree from their branch slots to their positions.

        Args:
            nodes: drafts from the root on, long [B, n].
            count: how many of them count, long [B].
        """
        step = torch.arange(nodes.shape[1], device=nodes.device)
        source = self.slots + nodes
        # what does not count is copied onto itself
        target = torch.where(step < count[:, None], self._root[:, None] + 1 + step, source)
        row = torch.arange(len(nodes), device=nodes.device)[:, None]
        for layer in self._in_use:
            where = layer.keys.device
            at, to, rows = source.to(where), target.to(where), row.to(where)
            layer.keys[rows, to] = layer.keys[rows, at]
            layer.values[rows, to] = layer.values[rows, at]
        if nodes.device.type == "cpu" and nodes.numel():
            self._reach = max(self._reach, int((self._root + count).max()) + 1)

    def _grow(self, slots: int) -> None:
        """Make room for branch slots in the buffers."""
        for layer in self._in_use:
            if layer.keys.shape[1] < slots:
                more = slots - layer.keys.shape[1]
                layer.keys, layer.values = (
                    torch.cat([x, x.new_zeros(len(x), more, *x.shape[2:])], 1)
                    for x in (layer.keys, layer.values)
                )
        self._branch_slots = max(self._branch_slots, slots - self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._in_use)

    @property
    def _in_use(self) -> list[Any]:
        """Layers that a call has written to: networks may leave some out."""
        return [layer for layer in self.layers if layer.is_initialized]

    @property
    def is_empty(self) -> bool:
        """True before the first call."""
        return not self._in_use

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 before the first call."""
        return next((len(layer.keys) for layer in self._in_use), 0)

    @mirrored
    def select(self, rows: Tensor | None) -> None:
        """The next calls are about these rows of the cache (long [B]); None: about all of them."""
        self._chosen = rows

    def _stand(self, positions: Tensor, rows: Tensor | None) -> None:
        self.positions, self.rows, self.span = (
            positions,
            self._chosen if rows is None else rows,
            None,
        )
        if positions.device.type != "cpu" or self.whole:
            self._reach = self.slots
            self.used = self.slots + (self._branch_slots if self.whole else 0)
            return
        at = positions.numpy()
        low, high = int(at.min()), int(at.max())
        self.used = self._reach = max(self._reach, high + 1)
        if self.used > self.slots:
            raise ValueError(f"position {self.used - 1} is beyond the cache of {self.slots} slots")
        if high - low + 1 == at.shape[1] and (at == np.arange(low, high + 1)).all():
            self.span = low, high + 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, L, H, D] of a layer; see ``SlotLayer.write``."""
        return self.layers[layer].write(keys, values)

    @contextmanager
    def only(self, columns: Tensor) -> Iterator[None]:
        """Let layers that run inside write the slots of some tokens of the call alone.

        Args:
            columns: these tokens, long [B, N], any of them repeatedly.
        """
        before = self.positions, self.span
        self.positions, self.span = self.positions.gather(1, columns), None
        try:
            yield
        finally:
            self.positions, self.span = before

    def note(self, name: str, values: Tensor) -> Tensor:
        """Write values of the call's tokens under a name, which follow their rows as keys do.

        Args:
            name: what they are called.
            values: [B, L, C].

        Returns:
            The values of all slots in use, [B, S, C].
        """
        if name not in self._notes:
            self._notes[name] = len(self.layers)
            self.layers.append(SlotLayer(self))
        nothing = values[:, :, None, :0]
        return self.write(self._notes[name], values[:, :, None], nothing)[0][:, :, 0]

    def noted(self, name: str) -> Tensor:
        """Return the values of all slots in use under a name: [B, S, C]."""
        return self.layers[self._notes[name]].read()[0][:, :, 0]

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values [B, S, H, D] of all layers, to be written in place."""
        return [layer.keys for layer in self.layers], [layer.values for layer in self.layers]

    def of_rows(self, rows: Tensor) -> SlotCache:
        """Copy some rows (long [n], which may repeat) to a cache of their own."""
        other = type(self)(len(self.layers), self.slots)
        other.used, other._reach, other.whole = self.used, self._reach, self.whole
        other.block_masks, other._notes = self.block_masks, dict(self._notes)
        other.windows = self.windows
        for mine, layer in zip(self.layers, other.layers, strict=True):
            if mine.is_initialized:
                here = rows.to(mine.keys.device)
                layer.keys, layer.values = mine.keys[here], mine.values[here]
                layer.is_initialized = True
        return other

    @mirrored
    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Write what some rows (long [n]) hold over what others (long [n]) do."""
        for layer in self._in_use:
            here = layer.keys.device
            to, at = target.to(here), source.to(here)
            layer.keys[to], layer.values[to] = layer.keys[at], layer.values[at]

    @mirrored
    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (long or bool [B])."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        for layer in self._in_use:
            here = rows.to(layer.keys.device)
            layer.keys = layer.keys.index_select(0, here)
            layer.values = layer.values.index_select(0, here)
