"""Forward passes as graphs of ``torch.compile``.

A network that reads and writes fixed slots is a function of tensors: inputs and masks of a call,
keys and values of all slots. Slots and positions are tensors, so that no graph depends on where a
row stands. Sizes are symbolic, and torch makes a graph of its own only where the batch or the
width is 1: at most four graphs serve all passes of a model.

A prompt's first pass runs without a graph: its width comes up once, and it makes the buffers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache as remember
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.slot_cache import SlotCache

GRAPHS = 64  # of all models of a process, up to four for each


class FixedSlots:
    """A slot cache inside a graph: buffers that are written in place and read as a whole.

    Args:
        keys: keys of every layer, [B, S, H, D].
        values: values of every layer, [B, S, H, D].
        slots: slots of the call's tokens, long [B, L].
        tables: see ``SlotCache.tables``.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor, tables: Any
    ):
        self.keys, self.values, self.slots, self.tables = keys, values, slots, tables
        self.row = torch.arange(slots.shape[0], device=slots.device)[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, L, H, D] of a layer; return all slots, [B, S, H, D]."""
        all_keys, all_values = self.keys[layer], self.values[layer]
        all_keys[self.row, self.slots], all_values[self.row, self.slots] = keys, values
        return all_keys, all_values

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write as ``write`` does, in transformers' order of axes: [B, H, L, D]."""
        keys, values = self.write(layer, keys.transpose(1, 2), values.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self, *args) -> int:
        """Return the number of slots."""
        return self.keys[0].shape[1]


def against_slots(
    adapter: Any,
    inputs: dict[str, Tensor],
    positions: Tensor,
    mask: Tensor,
    slots: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    tables: Any,
) -> Tensor:
    """Run an adapter's network against fixed slots, as a function of tensors."""
    cache = FixedSlots(keys, values, slots, tables)
    return adapter.network(inputs, positions, mask, cache)


def over_canvas(
    adapter: Any,
    inputs: dict[str, Tensor],
    positions: Tensor,
    mask: Tensor | None,
    tables: Any,
    keep: int,
) -> Tensor:
    """Run an adapter's network with attention among the tokens themselves."""
    return adapter.canvas_network(inputs, positions, mask, tables, keep)


@remember
def compiled(
    device: str, backend: str = "inductor", function: Callable[..., Tensor] = against_slots
) -> Callable[..., Tensor]:
    """Compile ``against_slots`` or ``over_canvas``, with CUDA graphs on a GPU."""
    more: dict[str, Any] = (
        {"mode": "reduce-overhead"} if device == "cuda" and backend == "inductor" else {}
    )
    # older versions of torch have a fixed limit of eight graphs
    if "recompile_limit" in signature(torch.compile).parameters:
        more["recompile_limit"] = GRAPHS
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True, **more)


class Graphs:
    """Graphs of one adapter's forward passes.

    Attributes:
        pads: whether widths are padded to powers of two, since a CUDA graph has one width.

    Args:
        device: type of the device.
        backend: backend of ``torch.compile``.
    """

    def __init__(self, device: str, backend: str = "inductor"):
        self._slots = compiled(device, backend, against_slots)
        self._canvas = compiled(device, backend, over_canvas)
        self.pads = device != "cpu"

    def new_cache(self, layers: int, slots: int) -> SlotCache:
        """Return an empty cache of ``slots`` positions."""
        cache = SlotCache(layers, slots)
        cache.whole = True
        return cache

    def against_slots(
        self,
        adapter: Any,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: Tensor | dict[str, Tensor],
        cache: Any,
    ) -> Tensor:
        """Run the network of an adapter against a slot cache whose buffers exist.

        Args:
            adapter: the adapter.
            inputs: arguments of the network, [B, L, ...] each.
            positions: absolute positions, long [B, L].
            mask: what is added to scores, [B, 1, L, S], or that of each kind of layer.
            cache: ``SlotCache`` that the call was announced to.

        Returns:
            Logits [B, L, V].
        """
        width = padded = positions.shape[1]
        # a view is a graph of its own, since a graph is told of what lies behind a view
        inputs = {name: _whole(x) for name, x in inputs.items()}
        positions, slots = _whole(positions), _whole(cache.positions)
        if self.pads:
            padded = 1 << (width - 1).bit_length()
        while padded > 1 and padded in adapter.constant_widths:
            padded += 1
        if more := padded - width:
            inputs = {name: repeat_last(x, more, 1) for name, x in inputs.items()}
            positions, slots = repeat_last(positions, more, 1), repeat_last(slots, more, 1)
            mask = (
                {kind: repeat_last(x, more, 2) for kind, x in mask.items()}
                if isinstance(mask, dict)
                else repeat_last(mask, more, 2)
            )
        keys, values = cache.buffers()
        run = self._slots
        out = _traced(
            adapter, run, adapter, inputs, positions, mask, slots, keys, values, cache.tables
        )
        return out[:, :width] if more else out

    def over_canvas(self, adapter: Any, *args: Any) -> Tensor:
        """Run the network of an adapter over a whole canvas: arguments of ``canvas_network``."""
        return _traced(adapter, self._canvas, adapter, *args)


def _whole(x: Tensor) -> Tensor:
    """Copy a tensor, without gaps and no view of another."""
    return x.clone(memory_format=torch.contiguous_format)


def repeat_last(x: Tensor, times: int, axis: int) -> Tensor:
    """Repeat the last column of an axis: a token that comes again at its position changes
    nothing."""
    last = x.narrow(axis, x.shape[axis] - 1, 1)
    return torch.cat([x, *[last] * times], axis)


def _traced(adapter: Any, run: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a compiled function.

    Raises:
        GenError: the network cannot be traced as one graph.
    """
    try:
        return run(*args)
    except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as error:
        reason = " ".join(str(error).split())[:160]
        raise GenError(
            f"compile cannot trace {type(adapter.model).__name__} as one graph ({reason}); expected"
            " a network without steps that depend on values, or compile off"
        ) from error


def require_fixed_network(adapter: Any, option: str) -> None:
    """Refuse an adapter whose passes are no functions of tensors.

    Args:
        adapter: adapter of a model.
        option: what asks for such passes, for messages.

    Raises:
        GenError: the network depends on values, or has weights on several devices or offloaded.
    """
    if not isinstance(adapter, ModelAdapter) or not adapter.compiles:
        named = adapter.model if isinstance(adapter, ModelAdapter) else adapter
        raise GenError(
            f"{option} does not support {type(named).__name__} as {type(adapter).__name__};"
            " expected a causal, masked or block model of codes whose attention takes masks and"
            " positions"
        )
    if adapter.takes_block_masks:
        raise GenError(
            f"{option} does not support attn_implementation 'flex_attention', which compiles its"
            f" own kernels; expected 'sdpa' or 'eager', or {option} off"
        )
    devices = sorted({str(p.device) for p in adapter.model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise GenError(
            f"{option} does not support weights on {' and '.join(devices)}; expected one device"
        )


def compiled_forward(adapter: Any, backend: str = "inductor") -> None:
    """Let an adapter's forward passes run as graphs, before it makes a cache.

    Args:
        adapter: adapter of a model.
        backend: backend of ``torch.compile``.

    Raises:
        GenError: the adapter's network does not compile, has weights on several devices or
            offloaded, or there is no compiler.
    """
    require_fixed_network(adapter, "compile")
    kind = adapter.device.type
    compiler = os.environ.get("CXX", "g++")
    if backend == "inductor" and kind == "cpu" and shutil.which(compiler) is None:
        raise GenError(
            f"compile found no C++ compiler {compiler!r}, which torch.compile needs on a CPU;"
            " install one or leave compile off"
        )
    adapter.graphs = Graphs(kind, backend)
