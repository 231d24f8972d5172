"""Rates of the machine at hand: bandwidth, matrices, attention, time per kernel.

``gen doctor --measure`` prints them. Weights are taken from a pool that exceeds the caches. Each
rate is the best of several repeats. With one thread on a CPU the clock is that of the process, so
that other processes count less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
import torch.nn.functional as F

from gen.bench.estimate.cost import Estimator
from gen.bench.estimate.devices import Device
from gen.bench.estimate.record import record
from gen.models.load.locate import pick_device, pick_dtype
from gen.pipeline.pipeline import load

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUERIES = (1, 4, 16, 64, 256)
WIDTH, INNER = 768, 2048  # about those of 85 M parameters
POOL = 160 * 2**20  # bytes of weights
CACHE = 4 * 2**20  # bytes that are taken from a cache
HEADS, DIM, KEYS = 24, 32, 160
REPEATS = 5


def measure_machine(device: str = "cpu", dtype: str = "float32") -> Device:
    """Measure the machine at hand in about ten seconds.

    Args:
        device: Name of the device.
        dtype: Dtype of matrices.

    Returns:
        The rates, with the number of threads.
    """
    where, kind = pick_device(device), pick_dtype(dtype)
    clock = _clock(where)
    matrices = _matrices(clock, where, kind)
    attended = _attention(clock, where, kind)
    name = str(where) if where.type == "cuda" else f"cpu, torch threads: {torch.get_num_threads()}"
    rates = Device(
        name,
        bandwidth=_copy(clock, where, 64 * 2**20),
        flops={dtype: max(matrices.values())},
        launch=0.0,
        source="measured",
        cache_bandwidth=_copy(clock, where, CACHE // 4),
        cache_bytes=CACHE,
        matmul=matrices,
        attention=attended,
        threads=torch.get_num_threads(),
        dtype=dtype,
    )
    return replace(rates, launch=_per_kernel(rates, where))


Clock = Callable[[Callable[[], object], int], float]


def _clock(device: torch.device) -> Clock:
    """Return a function that gives the least seconds of one of ``count`` calls."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    read = time.process_time if alone else time.perf_counter

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(call: Callable[[], object], count: int) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            wait()
            began = read()
            for _ in range(count):
                call()
            wait()
            best = min(best, (read() - began) / count)
        return best

    return timed


def _copy(clock: Clock, device: torch.device, size: int) -> float:
    """Return bytes per second of a copy, read and written."""
    a = torch.ones(size // 4, device=device)
    b = torch.ones_like(a)
    return 2 * size / clock(lambda: b.copy_(a), max(2, 2**26 // size))


def _matrices(clock: Clock, device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Return FLOP/s of products with weights from memory, by rows."""
    count = POOL // (WIDTH * INNER * dtype.itemsize)
    weights = [torch.randn(INNER, WIDTH, device=device, dtype=dtype) for _ in range(count)]
    found = {}
    for rows in ROWS:
        x, turn = torch.randn(rows, WIDTH, device=device, dtype=dtype), cycle(weights)
        seconds = clock(lambda x=x, turn=turn: F.linear(x, next(turn)), count)
        found[rows] = 2 * rows * WIDTH * INNER / seconds
    return found


def _attention(clock: Clock, device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Return FLOP/s of masked attention of two sequences, by queries."""
    keys, values = torch.randn(2, 2, HEADS, KEYS, DIM, device=device, dtype=dtype).unbind()
    found = {}
    for queries in QUERIES:
        q = torch.randn(2, HEADS, queries, DIM, device=device, dtype=dtype)
        mask = torch.zeros(2, 1, queries, KEYS, device=device, dtype=dtype)
        seconds = clock(
            lambda q=q, mask=mask: F.scaled_dot_product_attention(q, keys, values, mask), 10
        )
        found[queries] = 4 * q.numel() * KEYS / seconds
    return found


def _per_kernel(rates: Device, device: torch.device) -> float:
    """Return seconds per kernel that its work does not explain, with the Python code around it.

    A tiny built-in model decodes one item, and what memory and arithmetic take by the rates is
    taken off.
    """
    pipe = load("action", device=device)
    items = pipe.plan(pipe.modality.example_prompts(1, 0), 1, 0)
    spec, sampling = pipe.defaults.complete("autoregressive", {})
    recording = record(pipe, spec, sampling, items)
    cost = Estimator(replace(rates, launch=1.0), rates.dtype).cost(recording, {})
    kernels = cost.launch + sum(recording.loop.values())
    work = cost.seconds - kernels
    timed = _clock(device)
    seconds = timed(lambda: pipe.generate(items, spec, sampling, trace=False), 1)
    return max(1e-7, (seconds - work) / kernels)
