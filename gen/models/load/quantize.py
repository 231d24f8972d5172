"""Weight-only quantisation of a loaded network, by torchao.

Quantised are the linear layers inside the repeated blocks of the network. Embeddings, the output
head and layers of which there is one keep their dtype, as do experts that are stored as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.media.containers import require_package

QUANTIZATIONS = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}


@dataclass(frozen=True)
class Quantization:
    """How weights are quantised.

    Attributes:
        name: one of ``QUANTIZATIONS``, or the class of a configuration of torchao.
        options: arguments of torchao's configuration, such as ``group_size``.
        config: configuration of torchao; None for a name.
    """

    name: str
    options: Mapping[str, Any]
    config: Any = None

    @classmethod
    def of(cls, given: Any) -> Quantization | None:
        """Read what a user gave: a name, ``{"name": ..., option: value}``, a configuration of
        torchao, or None.

        Raises:
            GenError: an unknown name.
            WrongType: something else came.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {"name": given}
        if isinstance(given, Mapping):
            options = dict(given)
            name = options.pop("name", None)
            if name not in QUANTIZATIONS:
                raise unknown("quantization", name, QUANTIZATIONS)
            return cls(str(name), options)
        if type(given).__module__.partition(".")[0] == "torchao":
            return cls(type(given).__name__, {}, given)
        raise bad_type(
            "quantization", given, f"one of {', '.join(QUANTIZATIONS)}, or a mapping with a name"
        )

    @property
    def plain(self) -> Any:
        """Plain data that tells it from another one."""
        if self.config is not None:
            return repr(self.config)
        return {"name": self.name, **self.options} if self.options else self.name


def block_linears(network: nn.Module) -> dict[str, nn.Linear]:
    """Find the linear layers inside the repeated blocks of a network, by name.

    A linear layer that is itself an element of a list of layers is a head, and none of them.
    """
    lists = {name for name, m in network.named_modules() if isinstance(m, nn.ModuleList)}

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in lists for n in range(1, len(parts) - 1))

    return {
        name: m
        for name, m in network.named_modules()
        if isinstance(m, nn.Linear) and is_inside(name)
    }


def quantize(network: nn.Module, how: Quantization, name: str) -> None:
    """Quantise the weights of a network where they are.

    Args:
        network: the network, which is changed.
        how: the quantisation.
        name: name of the model in messages.

    Raises:
        GenError: torchao is missing, cannot quantise these weights on this device, or the network
            has no such layers.
    """
    torchao = require_package("torchao.quantization", '"gen-toolkit[quantization]"', "quantization")
    chosen = block_linears(network)
    if not chosen:
        raise GenError(
            f"model {name} has no linear layers in repeated blocks; expected some to quantise"
        )
    if any(m.weight.device.type == "meta" for m in chosen.values()):
        raise GenError(
            f"parts of model {name} are offloaded, and quantization needs all weights on a device;"
            " expected another device_map"
        )
    config = how.config
    if config is None:
        make: Callable[..., Any] = vars(torchao)[QUANTIZATIONS[how.name]]
        try:
            config = make(**how.options)
        except TypeError as error:
            raise bad_value("quantization", how.plain, f"options of torchao ({error})") from None
    wanted = {id(m) for m in chosen.values()}
    try:
        torchao.quantize_(network, config, filter_fn=lambda m, _: id(m) in wanted)
        for m in chosen.values():  # some kernels are missing, which the first call tells
            x = torch.zeros(1, m.in_features, device=m.weight.device, dtype=m.weight.dtype)
            m(x)
    except Exception as error:  # torchao raises what its kernels do
        reason = " ".join(str(error).split())[:200]
        device = next(network.parameters()).device
        raise GenError(
            f"torchao cannot run model {name} in {how.name} on {device}:"
            f" {type(error).__name__}: {reason}"
        ) from None
