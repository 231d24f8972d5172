"""A meter of what makes the host wait for a device, for machines that have none.

    with HostWaits() as meter:
        ...
    meter.waits            what was asked for, in turn: "nonzero", "numpy", ...
    meter.synchronisations how often the host would have waited
    meter.uploads          copies from the host that it would not have waited for

While it is on, every tensor says that it lies on an accelerator, and what is made there is made on
the CPU. So code takes the ways that it would take there, and gives what it gives on a CPU. A wait
is: a value, a list or an array of a tensor; an operator whose result has a size that the values
decide, a bool tensor as an index among them; a copy to the host; and one from it, unless it is
``non_blocking``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACCELERATOR, HOST = torch.device("cuda"), torch.device("cpu")
ARRAYS = {"numpy", "__array__"}  # only a tensor of the host has them: it was copied before
READS = {*ARRAYS, "tolist", "cpu"}  # of a tensor on a CPU these take no operator
SIZES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}


class HostWaits(TorchFunctionMode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.uploads = 0
        self.paused = False
        self._below = _Operators(self)

    @property
    def synchronisations(self) -> int:
        """How often the host would have waited for the device."""
        return sum(name not in ARRAYS for name in self.waits)

    def __enter__(self):
        self._from_numpy = torch.from_numpy
        torch.from_numpy = _of_host(torch.from_numpy)  # which no mode hears of
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._below.__exit__(*error)
        torch.from_numpy = self._from_numpy

    @contextmanager
    def off(self):
        """For a part that runs in the middle and is somebody else's."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func in (
            Tensor.device.__get__,
            Tensor.is_cpu.__get__,
            Tensor.is_cuda.__get__,
        ):
            return {
                Tensor.device.__get__: ACCELERATOR,
                Tensor.is_cpu.__get__: False,
                Tensor.is_cuda.__get__: True,
            }[func]
        said = [
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, (torch.device, str)) and str(x).split(":")[0] in ("cpu", "cuda")
        ]
        to_host = any(str(x) == "cpu" for x in said)
        moved = name == "to" and getattr(args[0], "of_host", False)
        if said and not to_host and moved and kwargs.get("non_blocking"):
            self.uploads += 1
        came = name in ("tensor", "as_tensor") or (moved and not kwargs.get("non_blocking"))
        if name in READS or (name == "to" and to_host) or (said and not to_host and came):
            self.waits.append(name)

        def real(x):
            return HOST if any(x is y for y in said) else x

        return func(*map(real, args), **{k: real(v) for k, v in kwargs.items()})


class _Operators(TorchDispatchMode):
    def __init__(self, meter: HostWaits):
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        masks = name in INDEXING and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in tree_leaves(args[1])
        )
        counted = name == "repeat_interleave" and kwargs.get("output_size") is None
        if not self.meter.paused and (name in SIZES or masks or counted):
            self.meter.waits.append(name)
        return func(*args, **kwargs)


def _of_host(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(array: Any) -> Any:
        out = make(array)
        out.of_host = True
        return out

    return made
