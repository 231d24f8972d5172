"""Forward passes whose bits do not depend on what runs beside a token (``batch_invariant``).

In 16-bit types, and in the last bits of any type, logits depend on the shape of a pass: a matrix
product takes another kernel for few rows, and attention adds the keys of a query in an order that
depends on the number of queries and of slots. So near ties fall differently when drafts are
verified 16 at a time than when tokens are decoded one at a time. Here the order is fixed:

    rows        a matrix product has at least as many rows as this device needs to give a row the
                bits that it has among any larger number of rows (``rows_needed`` measures it);
                missing rows are zeros
    queries     attention takes a multiple of ``QUERIES`` queries, since its kernel for CPUs treats
                a block of fewer otherwise; missing ones repeat the last one
    slots       a query reads the slots 0 .. S of its own path in their order, S a multiple of
                ``SLOTS``, as many as that kernel takes at a time; hidden ones add zeros. Drafts of
                a tree, which lie in branch slots, are read at the slots of their positions

    functions   activations and angles of rotations are computed from whole vectors of numbers, by
                one thread; missing numbers are zeros or repeat the last position

Norms work row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

from gen.core.errors import GenError
from gen.core.lookup import take
from gen.models.adapters.masks import LayerMasks, hide
from gen.models.adapters.slot_cache import SlotCache
from gen.models.load.networks import config_field

QUERIES, SLOTS = 4, 512
NAME = "gen_batch_invariant"  # attention implementation of transformers
Product = Callable[..., Tensor]
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")  # where they are
NUMBERS, SHARE = 64, 32_768  # of a vector of any kernel; that one thread takes
OUTPUTS = 100_000  # that are compared of each product
WIDTHS = (1, 2, 4, 5, 16, 33, 65)  # of passes whose attention is compared
AMONG = (1, 2, 3, 5, 15, 16, 33, 127, 256)  # further rows beside them


def is_replaced(module: nn.Module) -> bool:
    """Return whether something else than ``make_invariant`` replaced a module's forward."""
    forward = vars(module).get("forward")
    return forward is not None and not isinstance(forward, (Widened, OfVectors, OfBlocks))


def rounded(slots: int) -> int:
    """Round a number of slots up to a multiple of ``SLOTS``."""
    return -(-slots // SLOTS) * SLOTS


def attention_in_order(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Attend from a multiple of ``QUERIES`` queries to a multiple of ``SLOTS`` slots.

    Args:
        q: queries [B, L, H, d].
        k: keys of the slots of each row, [B, S, K, d], or of each query, [B, L, S, K, d].
        v: values likewise.
        mask: what is added to scores, [B, 1, L, S].
        scale: factor of the scores; None for 1 / sqrt(d).

    Returns:
        Attention outputs [B, L, H d].
    """
    batch, length, heads, size = q.shape
    groups = k.shape[-2]
    grouped = {"enable_gqa": True} if heads != groups else {}

    def attend(queries: Tensor, keys: Tensor, values: Tensor, masks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, masks, scale=scale, **grouped)

    if k.ndim == 5:  # every query by itself with its own keys: heads that share them are queries
        grouped = {}
        k, v = (x.flatten(0, 1).transpose(1, 2) for x in (k, v))
        share = heads // groups
        q = q.reshape(batch * length, groups, share, size)
        q = torch.cat([q, q[:, :, -1:].expand(-1, -1, -share % QUERIES, -1)], 2)
        mask = mask.expand(batch, -1, -1, -1).reshape(batch * length, 1, 1, -1)
        out = attend(q, k, v, mask.expand(-1, -1, q.shape[2], -1))[:, :, :share]
        return out.reshape(batch, length, heads * size)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if more := -length % QUERIES:
        q, mask = (torch.cat([x, x[:, :, -1:].expand(-1, -1, more, -1)], 2) for x in (q, mask))
    return attend(q, k, v, mask).transpose(1, 2)[:, :length].flatten(2)


def of_module(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend query by query, as transformers calls its attention implementations.

    Raises:
        GenError: the layer does more to scores than to scale and mask them.
    """
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise GenError(
                f"batch_invariant does not support the layers {type(module).__name__}, whose"
                f" attention has {name}; expected attention of scaled and masked scores"
            )
    if attention_mask is None:  # the class is called by itself, with its own cache
        length, slots = query.shape[2], key.shape[-2]
        column = torch.arange(slots, device=query.device)
        attention_mask = hide(column > column[slots - length :, None], query.dtype)[None, None]
    q = query.transpose(1, 2)
    k, v = (x.transpose(-3, -2) for x in (key, value))
    out = attention_in_order(q, k, v, attention_mask, scaling)
    return out.view(q.shape), None


AttentionInterface.register(NAME, of_module)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _products(network: nn.Module) -> Iterator[nn.Module]:
    """List one matrix product of each shape, type and kind of a network."""
    found = {}
    for module in network.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight
            found[type(module), tuple(weight.shape), weight.dtype, weight.device] = module
    yield from found.values()


@torch.no_grad()
def rows_needed(network: nn.Module, name: str) -> int:
    """Measure from how many rows on the products of a network give a row the same bits.

    Args:
        network: network on its device, in its type.
        name: name of the model, for messages.

    Raises:
        GenError: there is no such number up to ``CANDIDATES[-1]``.
    """
    generator, least = torch.Generator().manual_seed(0), 1
    most = CANDIDATES[-1] + max(AMONG)
    for module in _products(network):
        weight = module.weight
        width = weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1]
        x = torch.randn(most, width, generator=generator).to(weight.device, weight.dtype)
        whole = module(x)
        while not _agrees(module, x, whole, least):
            if least == CANDIDATES[-1]:
                raise GenError(
                    f"batch_invariant: products of {name} ({tuple(weight.shape)}, {weight.dtype}"
                    f" on {weight.device}) give a row other bits among more rows, up to"
                    f" {least} and {most}; expected a device whose kernels do not, such as a CPU"
                )
            least = CANDIDATES[CANDIDATES.index(least) + 1]
    return least


@torch.no_grad()
def require_attention(network: PreTrainedModel, name: str) -> None:
    """Compare attention of few and many queries, to few and many slots.

    Args:
        network: network on its device, in its type.
        name: name of the model, for messages.

    Raises:
        GenError: a query gets other bits among other queries or slots.
    """
    config, generator = network.config.get_text_config(), torch.Generator().manual_seed(0)
    heads = config.num_attention_heads
    groups = config_field(config, "num_key_value_heads") or heads
    size = config_field(config, "head_dim") or config.hidden_size // heads

    def random(length: int, count: int) -> Tensor:
        x = torch.randn(2, length, count, size, generator=generator)
        return x.to(network.device, network.dtype)

    length, slots = max(WIDTHS), 2 * SLOTS
    q, k, v = random(length, heads), random(slots, groups), random(slots, groups)
    last = SLOTS // 2 + torch.arange(length, device=q.device)
    mask = hide(torch.arange(slots, device=q.device) > last[:, None], q.dtype)[None, None]
    whole = attention_in_order(q, k, v, mask)
    for width in WIDTHS:
        for used in (SLOTS, slots):
            some, masks = q[:1, :width], mask[..., :width, :used]
            part = attention_in_order(some, k[:1, :used], v[:1, :used], masks)
            each = (x[:1, None, :used].expand(-1, width, -1, -1, -1) for x in (k, v))
            alone = attention_in_order(some, *each, masks)  # as in a tree of drafts
            if not (torch.equal(part, whole[:1, :width]) and torch.equal(alone, part)):
                raise GenError(
                    f"batch_invariant: attention of {name} ({network.dtype} on {network.device})"
                    f" gives {width} queries other bits among {length}; expected a device whose"
                    " kernels do not, such as a CPU"
                )


@dataclass(frozen=True)
class Widened:
    """Matrix product of x [..., D] that has at least so many rows.

    Attributes:
        product: the product; its other arguments are passed on.
        needed: rows.
    """

    product: Product
    needed: int

    def __call__(self, x: Tensor, *rest: Tensor) -> Tensor:
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        if rows >= self.needed:
            return self.product(x, *rest)
        more = (0, 0, 0, self.needed - rows)
        out = self.product(F.pad(x.reshape(rows, width), more), *rest)
        return out[:rows].view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class OfVectors:
    """Activation of whole vectors of numbers: a remainder gets other bits, and so does the end of
    each thread's share where there are many."""

    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        flat, count = x.reshape(-1), x.numel()
        flat = F.pad(flat, (0, -count % NUMBERS))
        if len(flat) <= SHARE:
            return self.activation(flat)[:count].view(x.shape)
        parts = [self.activation(some) for some in flat.split(SHARE)]
        return torch.cat(parts)[:count].view(x.shape)


@dataclass(frozen=True)
class OfBlocks:
    """Angles of rotations (cosines and sines, [B, L, d]) of as many positions at a time."""

    angles: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self, x: Tensor, position_ids: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, ...]:
        flat = position_ids.reshape(1, -1)
        count = flat.shape[1]
        flat = torch.cat([flat, flat[:, -1:].expand(-1, -count % NUMBERS)], 1)
        parts = [self.angles(x[:1], some, *rest, **more) for some in flat.split(NUMBERS, 1)]
        return tuple(
            torch.cat(found, 1)[:, :count].view(*position_ids.shape, -1)
            for found in zip(*parts, strict=True)
        )


def make_invariant(network: PreTrainedModel, name: str) -> Product:
    """Let the bits of a network's passes not depend on what runs beside a token.

    Args:
        network: causal network of transformers on its device, in its type.
        name: name of the model, for messages.

    Returns:
        The matrix product of x [..., D] and weights [O, D] that its passes use.

    Raises:
        GenError: the network has experts, whose products have rows of their own; or the products of
            this device give a row other bits among more rows, however many there are.
    """
    for field in ("num_experts", "num_local_experts"):
        if config_field(network.config.get_text_config(), field):
            raise GenError(
                f"batch_invariant does not support {name}, whose experts get as many rows as choose"
                " them; expected a model without experts"
            )
    needed = rows_needed(network, name)
    require_attention(network, name)
    network.set_attn_implementation(NAME)
    for path, module in network.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and needed > 1:
            vars(module)["forward"] = Widened(module.forward, needed)
        elif type(module).__module__ in ACTIVATIONS:
            vars(module)["forward"] = OfVectors(module.forward)
        elif path.endswith("rotary_emb"):
            vars(module)["forward"] = OfBlocks(module.forward)
    return Widened(F.linear, needed) if needed > 1 else F.linear


def _agrees(module: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor, least: int) -> bool:
    """Return whether products of ``least`` and more of the rows x [n, D] have the bits that they
    have in the product of all, ``whole`` [n, O].

    Sums that differ in their last bit are mostly rounded to the same number of 16 bits, so that
    many outputs are compared.
    """
    for count in (least, *(least + more for more in AMONG)):
        parts = -(-OUTPUTS // (count * whole.shape[1]))
        for some, expected in zip(x.split(count)[:parts], whole.split(count), strict=False):
            if len(some) == count and not torch.equal(module(some), expected):
                return False
    return True


def by_leaf(branch: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Group the columns of trees, the root's first, by leaves that stand on them.

    Args:
        branch: whether draft j is draft i or one before it on its branch, bool [B, D, D].

    Yields:
        The rows, int64 [B]; a leaf of each, int64 [B]; columns of its branch, int64 [B, n], the
        root's where there are fewer.
    """
    is_leaf = branch.sum(1) == 1
    leaf = (branch & is_leaf[:, :, None]).argmax(1)  # the first one that stands on each draft
    group = np.take_along_axis(is_leaf.cumsum(1) - 1, leaf, 1)
    rows = np.arange(len(branch))
    for number in range(int(group.max(initial=-1)) + 1):
        mine = group == number
        order = np.argsort(~mine, 1, kind="stable")[:, : mine.sum(1).max()]
        columns = np.where(np.take_along_axis(mine, order, 1), order + 1, 0)
        columns = columns if number else np.pad(columns, ((0, 0), (1, 0)))
        yield rows, leaf[rows, mine.argmax(1)], columns


class InvariantSlots(SlotCache):
    """Slot cache of which a query reads the slots of its own path in their order.

    Attributes:
        stands: slots at which the drafts of a tree are read by each draft, long [B, D, D]: their
            positions where they are on its branch, else their own; None for a chain.
        branches: of a tree, those slots for the drafts of one branch, long [B, D], and the columns
            of its queries, long [B, n].
    """

    branches: list[tuple[Tensor, Tensor]]

    def __init__(self, layers: int, slots: int):
        super().__init__(layers, rounded(slots))
        self.stands: Tensor | None = None

    def _stand(self, positions: Tensor, rows: Tensor | None) -> None:
        super()._stand(positions, rows)
        self.stands = None

    def _read_to(self, last: Tensor) -> None:
        super()._read_to(last)
        self.used = rounded(self.used)

    def in_use(self, buffer: Tensor) -> Tensor:
        """Return the slots in use of each row, [B, S, H, D], or of each query, [B, L, S, H, D]."""
        if self.stands is None:
            return super().in_use(buffer)
        device, (_, slots, heads, size) = buffer.device, buffer.shape
        batch, drafts = self.stands.shape[:2]
        rows = torch.arange(batch) if self.rows is None else self.rows
        read = torch.arange(self.slots + drafts, device=device).repeat(batch, 1 + drafts, 1)
        # the slot of a position is that of the draft which stands there
        column = self.slots + torch.arange(drafts, device=device)
        at = self.stands.to(device)
        read[:, 1:].scatter_(2, at, column.expand_as(at))
        read = read[..., : self.used] + rows.to(device)[:, None, None] * slots
        # whole slots are copied, several times as fast as by an index of rows and slots
        found = F.embedding(read, buffer.reshape(-1, heads * size))
        return found.view(*read.shape, heads, size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend as ``attention_in_order`` does, to the slots of a layer, where the keys and values
        [B, L, K, d] of the call are written first.

        Drafts of a tree are read where they stand: those of one branch after the other are copied
        to their positions, where nothing is read after the call, and not the text before them.
        """
        if self.stands is None:
            return attention_in_order(q, *self.write(layer, k, v), mask)
        own = self.layers[layer]
        own.put(k, v)
        buffers = [x if self.rows is None else x[self.rows] for x in (own.keys, own.values)]
        row = torch.arange(len(q), device=q.device)[:, None]
        first, out = self.slots, q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])
        for at, columns in self.branches:
            for buffer in buffers:
                buffer[row, at] = buffer[:, first : first + at.shape[1]].clone()
            keys, values = (buffer[:, : self.used] for buffer in buffers)
            masks = take(mask[:, 0], columns)[:, None]
            out[row, columns] = attention_in_order(take(q, columns), keys, values, masks)
        return out

    def _of_tree(self, positions: Tensor, branch: Tensor, dtype: torch.dtype) -> LayerMasks:
        """Make the masks of a tree as those of chains, and tell where its drafts are read."""
        self.used = self.slots
        self._read_to(positions)
        column = self.slots + torch.arange(branch.shape[1], device=positions.device)
        stands = self.stands = torch.where(branch, positions[:, None, 1:], column)
        self.branches = [
            (stands[rows, leaf], torch.from_numpy(columns).to(stands.device))
            for rows, leaf, columns in by_leaf(branch.cpu().numpy())
        ]
        return self._above(positions, positions, dtype)

    def note(self, name: str, values: Tensor) -> Tensor:
        """See ``SlotCache.note``.

        Raises:
            GenError: the call is about a tree.
        """
        if self.stands is not None:
            raise GenError(
                "batch_invariant does not support drafters that leave layers out of trees of"
                " drafts; expected a chain of drafts, or batch_invariant off"
            )
        return super().note(name, values)
