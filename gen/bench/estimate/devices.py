"""Devices of the cost model: published peaks, or rates that were measured on a machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gen.bench.estimate.count import Kernel
from gen.core.errors import GenError, unknown

HERE = "here"  # the machine at hand


@dataclass(frozen=True)
class Device:
    """Rates of a device.

    Attributes:
        name: name in tables.
        bandwidth: bytes per second from memory.
        flops: peak FLOP/s of matrices by dtype, without sparsity.
        launch: seconds per kernel that nothing hides.
        source: where the figures come from.
        cache_bandwidth, cache_bytes: bytes per second of kernels that touch at most so many.
        matmul, attention: measured FLOP/s by rows of the left matrix or queries. Weights came from
            memory, so the rates include the time of reading them.
        threads: threads that were measured; 0 for published figures.
        dtype: dtype of the measured rates.
    """

    name: str
    bandwidth: float
    flops: dict[str, float]
    launch: float
    source: str
    cache_bandwidth: float = 0.0
    cache_bytes: int = 0
    matmul: dict[int, float] = field(default_factory=dict)
    attention: dict[int, float] = field(default_factory=dict)
    threads: int = 0
    dtype: str = "bfloat16"

    def parts(self, kernel: Kernel, dtype: str) -> tuple[float, float, float]:
        """Return the seconds of memory, arithmetic and launch of a kernel.

        The first or the second is 0: what takes longer at the peak rates hides the other.
        """
        rates = {"matmul": self.matmul, "attention": self.attention}.get(kernel.kind)
        in_cache = self.cache_bytes and kernel.bytes <= self.cache_bytes
        memory = kernel.bytes / (self.cache_bandwidth if in_cache else self.bandwidth)
        if not kernel.flops:
            return memory, 0.0, self.launch
        compute = kernel.flops / (max(rates.values()) if rates else self.flops[dtype])
        longer = max(memory, compute)
        if rates:  # a measured rate holds the time of both
            longer = kernel.flops / interpolated(rates, kernel.rows)
        return (longer, 0.0, self.launch) if memory > compute else (0.0, longer, self.launch)

    def require(self, dtype: str) -> None:
        """Raise ``GenError`` for a dtype without figures."""
        if dtype not in self.flops:
            raise unknown("dtype", dtype, self.flops, f"device {self.name}")


def interpolated(rates: Mapping[int, float], rows: int) -> float:
    """Interpolate a rate between measured numbers of rows, linearly in logarithms."""
    known = sorted(rates)
    rows = min(max(rows, known[0]), known[-1])
    above = next(n for n in known if n >= rows)
    below = max(n for n in known if n <= rows)
    if above == below:
        return rates[rows]
    share = math.log(rows / below) / math.log(above / below)
    return rates[below] ** (1 - share) * rates[above] ** share


# Seconds from the launch of a kernel to its start: an assumption, no figure per card is published.
LAUNCH = 3.8e-6
SHEETS = "NVIDIA data sheet of the card; launch latency: assumed"


def _card(name: str, gigabytes: float, half: float, single: float) -> Device:
    """Return a card by GB/s and dense TFLOP/s; float32 without TF32, torch's default."""
    peaks = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return Device(name, gigabytes * 1e9, peaks, LAUNCH, SHEETS)


DEVICES = {
    "a100": _card("A100 SXM 80 GB", 2039, 312, 19.5),
    "h100": _card("H100 SXM", 3350, 989, 67),
    "h200": _card("H200 SXM", 4800, 989, 67),
    "l4": _card("L4", 300, 121, 30.3),
    "l40s": _card("L40S", 864, 362, 91.6),
}


def write_device(device: Device) -> dict[str, Any]:
    """Return a device as plain data."""
    return asdict(device)


def find_device(name: str) -> Device | None:
    """Return a device by name or file; None for the machine at hand, which must be measured.

    Raises:
        GenError: an unknown name, or a file that holds no device.
    """
    if name == HERE:
        return None
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    path = Path(name)
    if path.suffix != ".json":
        raise unknown("device", name, [HERE, *DEVICES], "--estimate, nor a file *.json")
    try:
        said = json.loads(path.read_text())
        said = said.get("measured", said)
        for key in ("matmul", "attention"):
            said[key] = {int(rows): rate for rows, rate in said.get(key, {}).items()}
        return Device(**said)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise GenError(
            f"{name} holds no device ({error}); expected a file of gen doctor --measure --out"
        ) from None
