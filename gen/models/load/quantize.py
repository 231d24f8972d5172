"""Weight-only quantisation of a loaded network, by torchao or bitsandbytes.

Quantised are the linear layers inside the repeated blocks of the network. Embeddings, the output
head and layers of which there is one keep their dtype, as do experts that are stored as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.media.containers import require_package
from gen.models.load.bits_and_bytes import BITS_AND_BYTES, bits_and_bytes_config, replace_linears
from gen.models.load.libraries import show_quantizers

TORCHAO = ("int8", "int4")
QUANTIZATIONS = (*TORCHAO, *BITS_AND_BYTES)
EXTRA = '"gen-toolkit[quantization]"'  # of pyproject.toml
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that can be quantised
GROUPS = (128, 64, 32)  # sizes that kernels of int4 take
SHOWN = 3  # layers that a message lists


@dataclass(frozen=True)
class Quantization:
    """How weights are quantised.

    Attributes:
        name: one of ``QUANTIZATIONS``, or the class of a configuration of torchao.
        options: arguments of the configuration, such as ``group_size``.
        config: configuration of torchao, or ``BitsAndBytesConfig``; None for a name.
    """

    name: str
    options: Mapping[str, Any]
    config: Any = None

    @classmethod
    def of(cls, given: Any) -> Quantization | None:
        """Read what a user gave: a name, ``{"name": ..., option: value}``, a configuration of
        torchao, a ``BitsAndBytesConfig``, the ``TorchAoConfig`` of transformers, or None.

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
        kind = type(given).__name__
        if kind == "TorchAoConfig":
            given = given.quant_type
        if type(given).__module__.partition(".")[0] == "torchao":
            return cls(type(given).__name__, {}, given)
        if kind == "BitsAndBytesConfig":
            return cls(
                "bitsandbytes_4bit" if given.load_in_4bit else "bitsandbytes_8bit", {}, given
            )
        raise bad_type(
            "quantization", given, f"one of {', '.join(QUANTIZATIONS)}, or a mapping with a name"
        )

    @property
    def plain(self) -> Any:
        """Plain data that tells it from another one."""
        if self.config is not None:
            return " ".join(repr(self.config).split())
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
        GenError: a package is missing, it cannot quantise these weights on this device, or the
            network has no such layers.
    """
    by = "bitsandbytes" if how.name in BITS_AND_BYTES else "torchao"
    show_quantizers()
    library = require_package(by, EXTRA, "quantization")
    chosen = block_linears(network)
    if not chosen:
        raise GenError(
            f"model {name} has no linear layers in repeated blocks; expected some to quantise"
        )
    weights = [m.weight for m in chosen.values()]
    if any(w.device.type == "meta" for w in weights):
        raise GenError(
            f"parts of model {name} are offloaded, and quantization needs all weights on a device;"
            " expected another device_map"
        )
    where = f"model {name} in {how.name} on {weights[0].device}"
    if weights[0].dtype not in FLOATS:
        given, *known = (str(x).removeprefix("torch.") for x in (weights[0].dtype, *FLOATS))
        raise GenError(
            f"{by} cannot run {where}: its weights are {given}; expected a dtype of"
            f" {', '.join(known)}"
        )
    try:
        if by == "bitsandbytes":
            config = how.config or bits_and_bytes_config(how.name, how.options, weights[0].dtype)
            replace_linears(network, chosen, config, library)
        else:
            _by_torchao(network, chosen, how)
        for m in block_linears(network).values():  # the first call tells whether there is a kernel
            x = torch.zeros(1, m.in_features, device=weights[0].device, dtype=weights[0].dtype)
            # a layer with an adapter for each row, which torchao's can be, takes whole batches
            m(x) if by == "bitsandbytes" else F.linear(x, m.weight, m.bias)
    except GenError:
        raise
    except Exception as error:  # the libraries raise what their kernels do
        reason = " ".join(str(error).split())[:200]
        raise GenError(f"{by} cannot run {where}: {type(error).__name__}: {reason}") from None


def _by_torchao(network: nn.Module, chosen: Mapping[str, nn.Linear], how: Quantization) -> None:
    """Quantise the chosen layers by torchao.

    Raises:
        GenError: torchao leaves some of them as they are.
    """
    api = require_package("torchao.quantization", EXTRA, "quantization")
    config = how.config
    if config is None:
        device = next(iter(chosen.values())).weight.device
        make, fixed = _torchao_config(how.name, device, api)
        try:
            config = make(**{**fixed, **how.options})
        except (TypeError, AssertionError) as error:
            raise bad_value("quantization", how.plain, f"options of torchao ({error})") from None
    wanted = {id(m) for m in chosen.values()}
    api.quantize_(network, config, filter_fn=lambda m, _: id(m) in wanted)
    left = [path for path, m in chosen.items() if type(m.weight) is nn.Parameter]
    if left:  # torchao passes over layers whose width no group divides
        shapes = [f"{path} {tuple(chosen[path].weight.shape)}" for path in left[:SHOWN]]
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        widths = [m.in_features for m in chosen.values()]
        fits = next((n for n in GROUPS if not any(w % n for w in widths)), None)
        raise GenError(
            f"torchao leaves layers as they are in {how.plain!r}: {', '.join(shapes)}{more};"
            " expected a group_size that divides their second number, "
            + (f"such as {{'name': {how.name!r}, 'group_size': {fits}}}" if fits else "or int8")
        )


def _torchao_config(
    name: str, device: torch.device, api: ModuleType
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class of torchao's configuration, and the arguments that the device asks for.

    torchao has a packing of int4 for each kind of device. The ones chosen here need no other
    package: the kernels belong to torch. The one of the CPU is among torchao's prototypes.
    """
    if name == "int8":
        return api.Int8WeightOnlyConfig, {"set_inductor_config": False}
    if device.type == "cpu":
        prototypes = require_package(
            "torchao.prototype.quantization.int4", EXTRA, "quantization in int4 on a CPU"
        )
        return prototypes.PrototypeInt4WeightOnlyConfig, {"set_inductor_config": False}
    fixed = {"int4_packing_format": "tile_packed_to_4d"} if device.type == "cuda" else {}
    return api.Int4WeightOnlyConfig, {**fixed, "set_inductor_config": False}
