"""Times and launches of calls on a device: medians of interleaved repeats, with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gen.bench.estimate.count import Meter

LEAST = 0.1  # seconds of a repeat, over which calls are averaged
MOST = 200  # calls of a repeat
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
Timed = Callable[[], float]  # runs something and returns its milliseconds


def wait(device: str) -> None:
    """Wait for what a device has been asked to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def averaged(run: Callable[[], object], device: str) -> Timed:
    """Return a function that times ``run`` over as many calls as take ``LEAST`` seconds.

    The first calls, which allocate and choose kernels, are made here.
    """
    calls = 3

    def timed() -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        return (time.perf_counter() - began) / calls * 1e3

    timed()
    calls = max(1, min(MOST, round(LEAST * 1e3 / timed())))
    return timed


def interleaved(arms: Mapping[str, Timed], repeats: int) -> dict[str, dict[str, float]]:
    """Time every arm once per repeat, beginning with another one each time.

    Returns:
        Median, least and most of the milliseconds of every arm.
    """
    names, found = list(arms), {name: [] for name in arms}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(arms[name]())
    return {
        name: {"ms": median(ms), "least": min(ms), "most": max(ms)} for name, ms in found.items()
    }


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Capture a call that reads nothing on the host in a CUDA graph, and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are chosen and memory is allocated before the capture
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def launches(run: Callable[[], Any], device: str) -> int:
    """Count what a call launches: on CUDA the launches of kernels and copies that the driver was
    asked for, elsewhere the operators that would be kernels (``gen.bench.estimate.count``)."""
    if not device.startswith("cuda"):
        with Meter(fused=True) as meter:
            run()
        return sum(meter.kernels.values())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        wait(device)
    return sum(e.count for e in seen.key_averages() if e.key.startswith(LAUNCHES))
