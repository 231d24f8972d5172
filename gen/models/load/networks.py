"""What networks and configs of other libraries say of themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def config_field(config: Any, name: str, default: Any = None) -> Any:
    """Read a field of a model's config, a class of another library: not every one has it."""
    return getattr(config, name, default)


def device_of(network: nn.Module) -> torch.device:
    """Return the device that a network computes on: that of its first weights in memory.

    A network whose weights are all offloaded computes where accelerate brings them, on the CPU.
    """
    first = None
    for parameter in network.parameters():
        if not parameter.is_meta:
            return parameter.device
        first = parameter if first is None else first
    is_placed = config_field(network, "hf_device_map") is not None  # accelerate's mark
    return torch.device("cpu") if first is None or is_placed else first.device
