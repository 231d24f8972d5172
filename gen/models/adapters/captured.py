"""Forward passes captured once and replayed: on a GPU, as CUDA graphs made by hand.

From Python a pass of a small network costs the launches of its kernels, not their arithmetic; a
graph launches them all at once. It replays the same kernels on the same addresses, so a pass is
captured for its number of rows and columns: inputs are copied into buffers of the graph, and keys
and values lie in memory that outlives the cache of a call (``SlotMemory``). Widths are padded to
powers of two and rows, of which some have finished, to the memory's or a half, a quarter, ... of
it, by columns and rows that come again. A prompt's first pass runs without a graph: its width comes
up once.

What replays a pass is a ``Recorder``: ``CudaRecorder`` in use, and on a CPU a recorder that
freezes every value that Python sees, which shows that nothing of a pass depends on one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.lookup import bucket
from gen.models.adapters.graphs import FixedSlots, repeat_last, require_fixed_network
from gen.models.adapters.slot_cache import SlotCache, SlotLayer
from gen.models.load.routed import router_of

LOG = logging.getLogger("gen")
SPARE = 2  # memories that no cache uses and that are kept, with their graphs
WARM_UP = 2  # passes before a capture, in which libraries allocate their workspaces

CANVASES = 64  # graphs of canvases that are kept
Pass = Callable[[Sequence[Tensor]], Any]  # returns a tensor, or a list of them
Graph = tuple[list[Tensor], Callable[[], Tensor]]  # inputs, and the pass on what they hold


class Recorder(Protocol):
    """Way to run a function of tensors again without Python."""

    def record(self, run: Pass, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Record a function on tensors whose addresses stay.

        Args:
            run: the function, which may write to its inputs.
            inputs: the tensors.

        Returns:
            a function that does the same to whatever the tensors hold then, and returns the output
            in a tensor that the next call writes again.
        """
        ...


class CudaRecorder:
    """CUDA graphs with one pool of memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Pass, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """See ``Recorder``.

        Raises:
            GenError: the function waits for the device, or does something else that a graph cannot.
        """
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                run(inputs)
        torch.cuda.current_stream().wait_stream(aside)
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                out = run(inputs)
        except RuntimeError as error:
            raise _not_captured(error) from error
        self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return out

        return replay


def _not_captured(error: Exception) -> GenError:
    reason = " ".join(str(error).split())[:160]
    return GenError(
        f"cuda_graphs cannot capture a forward pass ({reason}); expected a network without steps"
        " that depend on values, or cuda_graphs off"
    )


class SlotMemory:
    """Keys and values of a cache at addresses that stay, and the graphs that were captured there.

    Args:
        rows: rows that it has room for.
        slots: positions of each.
    """

    def __init__(self, rows: int, slots: int):
        self.rows, self.slots, self.branch_slots = rows, slots, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # [B, S, H, D] each
        self.graphs: dict[Any, Graph] = {}

    def of_layer(self, number: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, made like tensors [B, L, H, D] at first."""
        if number not in self.layers:
            size = self.rows, self.slots + self.branch_slots
            keys, values = (x.new_zeros(*size, *x.shape[2:]) for x in like)
            self.layers[number] = keys, values
        return self.layers[number]

    def grow(self, branch_slots: int) -> None:
        """Make room for the drafts of a larger tree, and of those up to the next power of two: the
        addresses are others, so that all passes are captured anew."""
        if branch_slots > self.branch_slots:
            before, self.branch_slots = self.branch_slots, 1 << (branch_slots - 1).bit_length()
            more = self.branch_slots - before
            self.graphs.clear()
            for number, pair in self.layers.items():
                keys, values = (
                    torch.cat([x, x.new_zeros(len(x), more, *x.shape[2:])], 1) for x in pair
                )
                self.layers[number] = keys, values

    def clear(self) -> None:
        """Forget what a call left, which may be no numbers: hidden slots are multiplied by 0."""
        for pair in self.layers.values():
            for x in pair:
                x.zero_()


class StaticLayer(SlotLayer):
    """Layer of a ``StaticSlots``; its buffers are the first rows of those of the memory."""

    owner: StaticSlots

    def __init__(self, owner: StaticSlots, number: int):
        super().__init__(weakref.proxy(owner))  # a cache that is dropped gives its memory back
        self.number = number

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        rows = len(keys) if self.owner.rows is None else self.owner.num_rows or len(keys)
        self.owner.memory.of_layer(self.number, keys, values)
        self.lie_in_memory(rows)
        self.is_initialized = True

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See ``SlotLayer``. A captured pass does not come here."""
        if self.is_initialized and self.owner.rows is None and self.number == 0:
            self.owner.captured.ran_without()
        return super().write(keys, values)

    def lie_in_memory(self, rows: int) -> None:
        """Let the buffers be the first rows of the memory."""
        keys, values = self.owner.memory.layers[self.number]
        self.keys, self.values = keys[:rows], values[:rows]


class StaticSlots(SlotCache):
    """Slot cache whose memory outlives it.

    Args:
        layers: number of layers.
        slots: number of positions.
        captured: lends the memory.
    """

    def __init__(self, layers: int, slots: int, captured: Captured):
        super().__init__(layers, slots)
        self.layers = [StaticLayer(self, number) for number in range(layers)]
        self.whole, self.captured, self._memory = True, captured, None

    @property
    def memory(self) -> SlotMemory:
        """Memory of the cache; the first call decides for how many rows."""
        if self._memory is None:
            assert self.positions is not None, "a call was announced"
            self._borrow(len(self.positions))
        return self._memory

    def _borrow(self, rows: int) -> None:
        memory = self.captured.lend(rows, self.slots)
        self._memory, self._branch_slots = memory, memory.branch_slots
        self._return = weakref.finalize(self, self.captured.take_back, memory)

    def _grow(self, slots: int) -> None:
        self.memory.grow(slots - self.slots)
        self._branch_slots = self.memory.branch_slots
        rows = self.num_rows
        for layer in self._in_use:
            layer.lie_in_memory(rows)

    def keep(self, rows: Tensor) -> None:
        """Keep the given rows (long or bool [B]), in place where there are no more than before."""
        kept = [(x, x.keys[rows], x.values[rows]) for x in self._in_use]
        if kept and len(kept[0][1]) > self.memory.rows:
            self._return()
            self._borrow(len(kept[0][1]))
            self.memory.grow(kept[0][1].shape[1] - self.slots)
            self._branch_slots = self.memory.branch_slots
        for layer, keys, values in kept:
            self.memory.of_layer(layer.number, keys, values)
            layer.lie_in_memory(len(keys))
            layer.keys[:, : keys.shape[1]], layer.values[:, : keys.shape[1]] = keys, values


class Captured:
    """Recorded forward passes of one model, and the memory that they use.

    Args:
        recorder: records a pass.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.without = 0  # passes that ran without a graph, prompts left out
        self._spare: list[SlotMemory] = []
        self._canvases: dict[Any, Graph] = {}
        self._rooms: dict[int, int] = {}  # most rows of canvases of a width
        self._tables: dict[int, Any] = {}  # what a forward made of the slots once
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let passes that run inside be parts of what is being recorded."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def new_cache(self, layers: int, slots: int) -> StaticSlots:
        """Return an empty cache of ``slots`` positions."""
        return StaticSlots(layers, slots, self)

    def lend(self, rows: int, slots: int) -> SlotMemory:
        """Return memory of so many rows and positions that no cache uses."""
        for memory in self._spare:
            if (memory.rows, memory.slots) == (rows, slots):
                self._spare.remove(memory)
                memory.clear()
                return memory
        return SlotMemory(rows, slots)

    def take_back(self, memory: SlotMemory) -> None:
        """Keep memory for later caches; the oldest goes where there is more than a few."""
        self._spare = [*self._spare, memory][-SPARE:]

    def ran_without(self) -> None:
        """Count a pass that runs without a graph, and say so once."""
        if not self.without:
            LOG.warning(
                "some passes of this sampler run without a CUDA graph: they return hidden states,"
                " or read mixtures of tokens"
            )
        self.without += 1

    def against_slots(
        self,
        adapter: Any,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: Tensor | dict[str, Tensor],
        cache: StaticSlots,
    ) -> Tensor:
        """Run the network of an adapter against a cache of ``new_cache`` that holds keys.

        Args:
            adapter: the adapter.
            inputs: arguments of the network, [B, L, ...] each.
            positions: absolute positions, long [B, L].
            mask: what is added to scores, [B, 1, L, S], or that of each kind of layer.
            cache: the cache, which the call was announced to.

        Returns:
            Logits [B, L, V].

        Raises:
            GenError: the pass cannot be captured.
        """
        (rows, width), memory = positions.shape, cache.memory
        if self._is_recording:  # a step, of which the pass is a part
            slots = [x[:rows] for pair in memory.layers.values() for x in pair]
            fixed = FixedSlots(slots[::2], slots[1::2], cache.positions, cache.tables)
            return adapter.network(inputs, positions, mask, fixed)
        height, columns = bucket(rows, memory.rows), 1 << (width - 1).bit_length()
        kinds = list(mask) if isinstance(mask, dict) else None
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        names, given = list(inputs), [*inputs.values(), positions, cache.positions]
        # a view of one row for all would be copied as one row: masks are made whole
        padded = [_padded(x, height - rows, columns - width, 1) for x in given]
        padded += [_padded(x, height - rows, columns - width, 2) for x in masks]
        key = (tuple(names), tuple(kinds or ()), tuple(x.shape for x in padded))
        if key not in memory.graphs:
            tables = self._tables.setdefault(cache.slots, cache.tables)
            slots = [x[:height] for pair in memory.layers.values() for x in pair]
            run = _pass(adapter, names, kinds, tables)
            memory.graphs[key] = self._recorded(run, padded, slots)
        return _replayed(memory.graphs[key], padded)[:rows, :width].clone()

    def over_canvas(
        self,
        adapter: Any,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: Tensor | None,
        tables: Any,
        keep: int,
    ) -> Tensor:
        """Run the network of an adapter over a whole canvas: arguments of ``canvas_network``."""
        if self._is_recording:
            return adapter.canvas_network(inputs, positions, mask, tables, keep)
        rows, width = positions.shape
        self._rooms[width] = max(rows, self._rooms.get(width, 0))
        height = bucket(rows, self._rooms[width])
        given = [*inputs.values(), positions, *([] if mask is None else [mask])]
        padded = [_padded(x, height - rows, 0, 1) for x in given]
        key = (tuple(inputs), keep, tuple(x.shape for x in padded))
        if key not in self._canvases:
            run = _canvas_pass(adapter, list(inputs), mask is not None, tables, keep)
            self._canvases[key] = self._recorded(run, padded, [])
            while len(self._canvases) > CANVASES:  # the oldest
                del self._canvases[next(iter(self._canvases))]
        return _replayed(self._canvases[key], padded)[:rows].clone()

    def _recorded(self, run: Pass, inputs: list[Tensor], memory: list[Tensor]) -> Graph:
        """Record a pass on copies of its inputs and on memory that stays."""
        static = [x.contiguous().clone() for x in inputs]
        return static, self.recorder.record(run, [*static, *memory])


def _replayed(graph: Graph, inputs: list[Tensor]) -> Tensor:
    """Run a graph on inputs of its shapes; the next run writes the same output."""
    static, replay = graph
    for to, x in zip(static, inputs, strict=True):
        to.copy_(x)
    return replay()


def _canvas_pass(adapter: Any, names: list[str], masked: bool, tables: Any, keep: int) -> Pass:
    """Return the pass over a canvas as a function of its inputs, positions, and mask if any."""
    count = len(names)

    def run(tensors: Sequence[Tensor]) -> Tensor:
        inputs = dict(zip(names, tensors[:count], strict=True))
        mask = tensors[count + 1] if masked else None
        return adapter.canvas_network(inputs, tensors[count], mask, tables, keep)

    return run


def _pass(adapter: Any, names: list[str], kinds: list[str] | None, tables: Any) -> Pass:
    """Return the network's pass as a function of one list of tensors: its inputs, positions, slots,
    masks, then keys and values of every layer."""
    count, masks = len(names), 1 if kinds is None else len(kinds)

    def run(tensors: Sequence[Tensor]) -> Tensor:
        inputs = dict(zip(names, tensors[:count], strict=True))
        positions, at = tensors[count : count + 2]
        rest = tensors[count + 2 :]
        mask = rest[0] if kinds is None else dict(zip(kinds, rest[:masks], strict=True))
        cache = FixedSlots(rest[masks::2], rest[masks + 1 :: 2], at, tables)
        return adapter.network(inputs, positions, mask, cache)

    return run


def _padded(x: Tensor, rows: int, columns: int, axis: int) -> Tensor:
    """Repeat the last row, and the last column along an axis."""
    x = repeat_last(x, columns, axis) if columns else x
    return repeat_last(x, rows, 0) if rows else x


def captured_forward(adapter: Any, captured: Captured | None = None) -> Captured:
    """Let an adapter's forward passes be captured, before it makes a cache.

    Args:
        adapter: adapter of a model.
        captured: passes that were captured for an adapter of the same model; None for none yet.

    Returns:
        the passes.

    Raises:
        GenError: the adapter's passes cannot be captured.
    """
    require_fixed_network(adapter, "cuda_graphs")
    if not adapter.captures:
        raise GenError(
            f"cuda_graphs does not support {type(adapter.model).__name__} as"
            f" {type(adapter).__name__}; expected a causal or masked language model"
        )
    if router_of(adapter.model) is not None:
        raise GenError(
            "cuda_graphs does not support adapters by name, which each pass chooses anew; expected"
            " the folder of one adapter, or cuda_graphs off"
        )
    captured = Captured(CudaRecorder()) if captured is None else captured
    adapter.graphs = adapter.captured = captured
    return captured
