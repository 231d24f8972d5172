"""Options of a pipeline that change how forward passes run."""

from __future__ import annotations

from typing import Any

import torch

from gen.core.errors import GenError, bad_value
from gen.models.adapters.sparse_prefill import SparsePrefill


def one_of(
    device: torch.device,
    tp: Any,
    sparse_prefill: Any,
    compile: bool,
    batch_invariant: Any,
    cuda_graphs: Any,
) -> SparsePrefill | None:
    """Read the options of which a pipeline takes one; return how prompts skip layers.

    Raises:
        GenError: several are given, one has a value that it cannot have, or the device has none.
    """
    for name, value in (("batch_invariant", batch_invariant), ("cuda_graphs", cuda_graphs)):
        if not isinstance(value, bool):
            raise bad_value(name, value, "true or false")
    if cuda_graphs and device.type != "cuda":
        raise GenError(
            f"cuda_graphs is True, and the models are on {device.type!r}; expected a device of"
            " CUDA, or cuda_graphs off"
        )
    skipping = SparsePrefill.of(sparse_prefill)
    options = {
        "tp": tp is not None,
        "sparse_prefill": skipping is not None,
        "compile": compile,
        "batch_invariant": batch_invariant,
        "cuda_graphs": cuda_graphs,
    }
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise GenError(f"{given[0]} and {given[1]} are given; expected one of them")
    return skipping
