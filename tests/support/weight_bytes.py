"""Bytes that weights take in memory, quantised or not."""

from __future__ import annotations

import torch
from torch import nn


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, with the scales and zeros that make numbers of a quantised one."""
    names = getattr(weight, "tensor_data_names", ())
    if names:  # torchao: some parts are there for some of its layouts
        parts = [getattr(weight, n) for n in (*names, *weight.optional_tensor_data_names)]
        return sum(part.nbytes for part in parts if part is not None)
    state = getattr(weight, "quant_state", None)
    if state is not None:  # bitsandbytes, 4 bits
        return weight.nbytes + state.absmax.nbytes + state.code.nbytes
    return weight.nbytes


def layer_bytes(layer: nn.Linear) -> int:
    """Bytes of the weight of a linear layer."""
    state = getattr(layer, "state", None)  # bitsandbytes, 8 bits: it has the scales
    scales = getattr(layer.weight, "SCB", None)
    scales = scales if scales is not None or state is None else state.SCB
    return stored_bytes(layer.weight) + (0 if scales is None else scales.nbytes)


def network_bytes(network: nn.Module) -> int:
    """Bytes of all parameters of a network; one that two layers share counts once."""
    linears = {id(m.weight): m for m in network.modules() if isinstance(m, nn.Linear)}
    parameters = {id(p): p for p in network.parameters()}
    return sum(
        layer_bytes(linears[key]) if key in linears else stored_bytes(p)
        for key, p in parameters.items()
    )
