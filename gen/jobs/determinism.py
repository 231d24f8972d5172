"""``deterministic: true``: the same bits from the same microbatches, on one kind of machine.

A matrix product adds up in another order when the batch, the number of threads or the algorithm is
another one, and a last bit can flip a token. So the microbatches are those of the plan
(`gen.jobs.microbatch`), every worker computes with one thread on a CPU, and of algorithms only
those that give the same bits each time; an operation that has none raises. It costs the threads:
use more workers in their place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """See the module; puts back what it found."""
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    threads, strict, tuned = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        torch.backends.cudnn.benchmark = tuned
