"""Count kernels, bytes and FLOPs of what runs inside, on any device or on none.

    with Meter() as meter:
        ...
    meter.kernels      Counter of ``Kernel``

Views are not kernels. A kernel reads its tensors and writes its results once; look-ups read what
they return. Attention is one kernel, whatever the backend does: masks, scores and weights stay in
the fused kernels of CPU and GPU. ``fused``: norms are one kernel, as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FREE = {"empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view", "lift_fresh"}
LOOKUPS = {"embedding", "gather", "index_select", "index"}
STORES = {"index_put_", "_index_put_impl_", "index_put", "scatter_", "index_copy_"}


class Kernel(NamedTuple):
    """Kernel of one shape.

    Attributes:
        kind: ``matmul``, ``attention`` or ``other``.
        rows: rows of the left matrix, or queries; 0 for others.
        bytes: bytes that are read and written.
        flops: floating-point operations of matrices; 0 for others.
    """

    kind: str
    rows: int
    bytes: int
    flops: int


class Meter(TorchFunctionMode):
    """See the module."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.kernels: Counter[Kernel] = Counter()
        self.keys = 0  # of the last attention
        self._below, self._paused = _Operators(self), False

    def __enter__(self):
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._below.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside."""
        before, self._paused = self._paused, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._paused = before

    @property
    def bytes(self) -> int:
        """Bytes of all kernels."""
        return sum(kernel.bytes * n for kernel, n in self.kernels.items())

    @property
    def flops(self) -> int:
        """FLOPs of all kernels."""
        return sum(kernel.flops * n for kernel, n in self.kernels.items())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(func, args, kwargs)
        if func is torch.rms_norm and self.fused:
            return self._normalise(func, args, kwargs)
        return func(*args, **kwargs)

    def _attend(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Count attention [B, H, L, d] of S keys as one kernel."""
        query, key = args[:2]
        self.keys = key.shape[-2]
        flops = 4 * query.numel() * self.keys
        with self.paused():
            meta = query.device.type == "meta"
            out = torch.empty_like(query) if meta else func(*args, **kwargs)
        self.add("attention", query.shape[-2], flops, [*tree_leaves((args, kwargs)), out])
        return out

    def _normalise(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Count a norm as one kernel, which it is on an accelerator."""
        with self.paused():
            out = func(*args, **kwargs)
        self.add("other", 0, 0, [*tree_leaves((args, kwargs)), out])
        return out

    def add(self, kind: str, rows: int, flops: int, tensors: list[Any]) -> None:
        """Count a kernel that touches these tensors."""
        if not self._paused:
            touched = sum(_bytes(x) for x in tensors if isinstance(x, Tensor))
            self.kernels[Kernel(kind, rows, touched, flops)] += 1

    def operator(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Count a call of an operator."""
        name = func.overloadpacket.__name__
        inputs, outputs = tree_leaves((args, kwargs)), tree_leaves(out)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if name in FREE or name == "_local_scalar_dense" or _is_view(func):
            return
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
            left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
            self.add("matmul", left.shape[-2], flops, [*inputs, *outputs])
        elif name in LOOKUPS:
            self.add("other", 0, 0, [*tensors[1:], *outputs, *outputs])
        elif name in STORES:
            self.add("other", 0, 0, [*tensors[1:], tensors[-1]])
        else:
            self.add("other", 0, 0, [*inputs, *outputs])


class _Operators(TorchDispatchMode):
    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.meter.operator(func, args, kwargs or {}, out)
        return out


def _bytes(x: Tensor) -> int:
    """Bytes that a tensor covers in memory: an expanded axis is stored once."""
    if not x.numel():
        return 0
    distinct = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        distinct *= size if stride else 1
    return distinct * x.element_size()


def _is_view(func: Any) -> bool:
    """Return True for an operator whose results are views of its arguments."""
    returned = func._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )
