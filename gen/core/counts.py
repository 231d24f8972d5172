"""Counts that a request states, held against the memory that is free before anything is allocated.

One more beam, draft or step takes at least some bytes. Those are counted low, so that nothing that
would fit is refused; a count that cannot fit would be tried until memory ends.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from gen.core.errors import bad_value
from gen.core.token_space import TokenSpace

SHARE = 0.5  # of the free memory that one count may take
ITEM = 4096.0  # bytes of one item: its plan, condition, statistics and entry in the output
BYTES = {  # of one more, by what it is; see ``bytes_of``
    "row": "its tokens and the distribution of its next one",
    "column": "the distribution of one more position in a pass",
    "step": "its entry in a schedule",
}


def bytes_of(space: TokenSpace) -> dict[str, float]:
    """Return the bytes that one more of each kind takes at least; keys as of ``BYTES``.

    Args:
        space: token space of a row. Keys and values of the model come on top.
    """
    distribution = 8.0 * max(space.vocab_size, 1)  # logits and log-probabilities
    row = ITEM + 8.0 * space.length + distribution
    return {"row": row, "column": distribution, "step": 64.0}


def require_count(name: str, count: int, each: float, free: float) -> None:
    """Refuse a count that memory does not hold.

    Args:
        name: name of the parameter.
        count: what came.
        each: bytes of one.
        free: bytes of memory that are free.

    Raises:
        GenError: it is more than the bound, which the message has.
    """
    most = max(1, int(SHARE * free / each))
    if count > most:
        raise bad_value(
            name, count, f"at most {most:,}, which the {free / 1e9:.1f} GB of free memory hold"
        )


def require_counts(sampler: Any, space: TokenSpace, free: float) -> None:
    """Refuse a sampler with a count that memory does not hold; those of a sampler that it runs
    multiply with its own.

    Args:
        sampler: the sampler.
        space: token space of a row.
        free: bytes of memory that are free.

    Raises:
        GenError: there is such a count, the first of them.
    """
    _require(sampler, bytes_of(space), free, "sampler")


def _require(sampler: Any, each: Mapping[str, float], free: float, owner: str) -> None:
    most = 1
    for name, kind, count in counts_of(sampler):
        require_count(f"{owner}.{name}", count, each[kind], free)
        most = max(most, count if kind == "row" else 1)
    if sampler.wraps:
        _require(sampler.inner, each, free / most, f"{owner}.base")


def counts_of(sampler: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the counts of a sampler that are in use: name, key of ``BYTES``, and value."""
    for field in dataclasses.fields(sampler):
        kind, value = field.metadata.get("each"), getattr(sampler, field.name)
        if kind and isinstance(value, int) and not sampler.unread(field.name):
            yield field.name, kind, value


def free_bytes(device: torch.device | str | None = None) -> int:
    """Return the bytes of memory that this process can still have: the least of what the machine,
    its control group and the limit of its address space leave.

    Args:
        device: device of torch; None is the CPU.
    """
    if device is not None and torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = psutil.virtual_memory().available
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        free = min(free, most - psutil.Process().memory_info().vms)
    return max(0, int(min(free, _left_in_group())))


def _left_in_group() -> float:
    """Return the bytes that a control group of Linux, such as that of a container, leaves: pages of
    files that nobody uses go when memory is asked for."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stated = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        return most - used + int(stated["inactive_file"])
    except (OSError, ValueError, KeyError):  # none, or one without a limit
        return float("inf")
