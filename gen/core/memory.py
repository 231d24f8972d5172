"""Memory that runs out: how to recognise it, and how to give memory back."""

from __future__ import annotations

import ctypes
import gc
import sys

MANY = 2000  # rows whose memory is worth giving back
OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(problem: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(problem, MemoryError) or (
        torch is not None and isinstance(problem, torch.OutOfMemoryError)
    ):
        return True
    return isinstance(problem, RuntimeError) and any(
        mark.lower() in str(problem).lower() for mark in OUT_OF_MEMORY
    )


def free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def give_back(rows: int) -> None:
    """Let the system have memory that is free again: a C library may keep what reading a manifest
    of so many ``rows`` took. Of few rows it is not worth the time, which goes into looking at
    everything that is imported."""
    if rows < MANY:
        return
    gc.collect()
    trim()


def trim() -> None:
    """Let the system have free memory that the C library keeps."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library, which has its own ways
        pass
