"""Time of recorded decoding on a device.

    seconds of a kernel = max(bytes / bandwidth, FLOPs / peak) + launch

A batch takes the sum over its kernels: those of the forward passes at the size in question, and
those of the loop, which are the same at any size. Kernels run one after the other, launches are not
hidden behind them, and each synchronisation with an accelerator, and each copy to it, costs one
launch more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gen.bench.estimate.count import Kernel
from gen.bench.estimate.devices import Device
from gen.bench.estimate.record import Pass, Recording, count_pass


@dataclass(frozen=True)
class Cost:
    """Seconds of one item.

    Attributes:
        memory, compute, launch: of forward passes, by what they wait for.
        draft: of forward passes of draft models.
        loop: of everything outside of the networks.
    """

    memory: float
    compute: float
    launch: float
    draft: float
    loop: float

    @property
    def network(self) -> float:
        """Seconds of the model's forward passes."""
        return self.memory + self.compute + self.launch

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.network + self.draft + self.loop


class Estimator:
    """Cost of recordings on one device, for models of other sizes.

    Counts of a forward pass are kept, since most recordings share them.
    """

    def __init__(self, device: Device, dtype: str):
        device.require(dtype)
        self.device, self.dtype = device, dtype
        self._passes: dict[tuple[str, Pass], tuple[float, float, float]] = {}

    def cost(self, recording: Recording, configs: Mapping[str, Mapping[str, Any]]) -> Cost:
        """Return the cost of one item; ``configs`` replaces those of models of another size."""
        main = next(iter(recording.configs))
        sums, draft = [0.0, 0.0, 0.0], 0.0
        spans = _spans(recording.passes)
        for one, count in recording.passes.items():
            config = configs.get(one.model, recording.configs[one.model])
            parts = self._between(config, one, *spans[one._replace(keys=0)])
            if one.model == main:
                sums = [a + count * b for a, b in zip(sums, parts, strict=True)]
            else:
                draft += count * sum(parts)
        loop = sum(self._sum(recording.loop, "float32"))
        loop += (recording.waits + recording.uploads) * self.device.launch
        n = recording.items
        return Cost(*(part / n for part in sums), draft / n, loop / n)

    def _between(
        self, config: Mapping[str, Any], one: Pass, low: int, high: int
    ) -> tuple[float, ...]:
        """Interpolate the cost of a pass between those with the fewest and the most keys.

        Bytes and FLOPs are linear in the number of keys.
        """
        ends = [self._pass(config, one._replace(keys=keys)) for keys in (low, high)]
        share = (one.keys - low) / (high - low) if high > low else 1.0
        return tuple(a + share * (b - a) for a, b in zip(*ends, strict=True))

    def _pass(self, config: Mapping[str, Any], one: Pass) -> tuple[float, float, float]:
        key = repr(sorted((k, repr(v)) for k, v in config.items())), one
        if key not in self._passes:
            self._passes[key] = self._sum(self._counted(config, one), self.dtype)
        return self._passes[key]

    def _counted(self, config: Mapping[str, Any], one: Pass) -> Counter[Kernel]:
        return count_pass(config, one, self.dtype, fused=not self.device.threads)

    def _sum(self, kernels: Counter[Kernel], dtype: str) -> tuple[float, float, float]:
        """Add the seconds of kernels by what they wait for."""
        dtype = dtype if dtype in self.device.flops else self.dtype
        parts = [(self.device.parts(kernel, dtype), n) for kernel, n in kernels.items()]
        memory, compute, launch = (sum(p[i] * n for p, n in parts) for i in range(3))
        return memory, compute, launch


def _spans(passes: Counter[Pass]) -> dict[Pass, tuple[int, int]]:
    """Return the fewest and the most keys of the passes that differ in nothing else."""
    found: dict[Pass, list[int]] = {}
    for one in passes:
        found.setdefault(one._replace(keys=0), []).append(one.keys)
    return {one: (min(keys), max(keys)) for one, keys in found.items()}
