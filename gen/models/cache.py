"""A key-value cache whose slot is the absolute position.

Rows of a batch stand at different positions, drafts are rejected, windows slide: with one slot per position all of that
is the same operation. New keys and values are written to the slots of their positions; a slot above a query's own
position is never attended to, and by the time a query passes it, it has been written again. So a rejected draft needs
no rollback, no crop and no gather.

Models that look both ways use the same slots with another mask (``among``): which slots may be seen is said slot by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's buffers: keys and values [B, S, H, D], B rows and S slots."""

    def __init__(self, owner: SlotCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        b, h, _, d = key_states.shape
        self.keys = key_states.new_zeros(b, self.owner.slots, h, d)
        self.values = value_states.new_zeros(b, self.owner.slots, h, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes [B, H, L, D] to the owner's positions and returns all slots in use, of the owner's rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        here = key_states.device  # layers of one model may lie on several devices
        positions, used = self.owner.positions.to(here), self.owner.used
        some = None if self.owner.rows is None else self.owner.rows.to(here)
        rows = torch.arange(len(positions), device=here) if some is None else some
        self.keys[rows[:, None], positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], positions] = value_states.transpose(1, 2)
        picked = slice(None) if some is None else some
        return self.keys[picked, :used].transpose(1, 2), self.values[picked, :used].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.used, 0

    def get_seq_length(self) -> int:
        return self.owner.used

    def get_max_length(self) -> int:
        return self.owner.slots


class SlotCache(Cache):
    """``layers`` buffers of ``slots`` positions each; ``at`` or ``among`` before every forward call. The first call brings all rows along."""

    def __init__(self, layers: int, slots: int):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.slots, self.used = slots, 0
        self.positions: Tensor | None = None
        self.rows: Tensor | None = None  # of the cache, those that the call is about, if not all

    def at(self, positions: Tensor, dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
        """Says where the next call's tokens stand (long [B, L]) and returns its mask, float [B, 1, L, used]: 0 for slots up to
        the query's own position, or up to ``last`` [B, L] (the end of its block), the smallest number above."""
        self._stand(positions, None)
        above = torch.arange(self.used, device=positions.device) > (positions if last is None else last)[..., None]
        mask = torch.zeros(above.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(above, torch.finfo(dtype).min)[:, None]

    def among(self, positions: Tensor, dtype: torch.dtype, seen: Tensor, rows: Tensor | None = None) -> Tensor:
        """As ``at``, for tokens that may stand before what they see: 0 for the slots in ``seen`` (bool [B, slots]), the same for all tokens
        of a row. ``rows`` long [B]: the rows of the cache that these are, if not all. Padding a row by repeating one of its tokens with its
        position changes nothing."""
        self._stand(positions, rows)
        seen = seen[:, : self.used]
        mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[:, None, None].expand(-1, -1, positions.shape[1], -1)

    def _stand(self, positions: Tensor, rows: Tensor | None) -> None:
        self.positions, self.rows, self.used = positions, rows, max(self.used, int(positions.max()) + 1)
        if self.used > self.slots:
            raise ValueError(f"position {self.used - 1} is beyond the cache of {self.slots} slots")

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (long or bool [B])."""
        for layer in self.layers:
            if layer.is_initialized:
                here = rows.to(layer.keys.device)
                layer.keys, layer.values = layer.keys[here], layer.values[here]
