"""Weight-only quantisation of a loaded network, by torchao or bitsandbytes.

Quantised are the linear layers inside the repeated blocks of the network and, where asked for, its
output head. Embeddings and layers of which there is one keep their dtype, as do experts that are
stored as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.media.containers import require_package
from gen.models.load.bits_and_bytes import (
    BITS_AND_BYTES,
    bits_and_bytes_config,
    replace_linears,
    skips_none,
)
from gen.models.load.libraries import show_quantizers

TORCHAO = ("int8", "int4")
QUANTIZATIONS = (*TORCHAO, *BITS_AND_BYTES)
EXTRA = '"gen-toolkit[quantization]"'  # of pyproject.toml
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that can be quantised
SKIPS = ("modules_to_not_convert", "llm_int8_skip_modules")  # of torchao, of bitsandbytes
GROUPS = (128, 64, 32)  # sizes that kernels of int4 take
SHOWN = 3  # layers that a message lists


@dataclass(frozen=True)
class Quantization:
    """How weights are quantised.

    Attributes:
        name: one of ``QUANTIZATIONS``, or the class of a configuration of torchao.
        options: arguments of the configuration, such as ``group_size``.
        config: configuration of torchao, or ``BitsAndBytesConfig``; None for a name.
        head: whether the output head is quantised, too.
    """

    name: str
    options: Mapping[str, Any]
    config: Any = None
    head: bool = False

    @classmethod
    def of(cls, given: Any) -> Quantization | None:
        """Read what a user gave: a name, ``{"name": ..., "head": true, option: value}``, a
        configuration of torchao, a ``BitsAndBytesConfig``, the ``TorchAoConfig`` of transformers,
        or None. As in transformers, an empty list of modules to skip quantises the output head.

        Raises:
            GenError: an unknown name, or embeddings or single modules are to be quantised or not.
            WrongType: something else came.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = {"name": given}
        if isinstance(given, Mapping):
            options = dict(given)
            name, head = options.pop("name", None), options.pop("head", False)
            if name not in QUANTIZATIONS:
                raise unknown("quantization", name, QUANTIZATIONS)
            if not isinstance(head, bool):
                raise bad_type("quantization.head", head, "true or false")
            head |= skips_none(SKIPS[1], options.pop(SKIPS[1], None))
            return cls(str(name), options, head=head)
        kind, skipped = type(given).__name__, None
        if kind == "TorchAoConfig":
            _require_no_embeddings(given)
            skipped, given = given.modules_to_not_convert, given.quant_type
        if type(given).__module__.partition(".")[0] == "torchao":
            return cls(type(given).__name__, {}, given, skips_none(SKIPS[0], skipped))
        if kind == "BitsAndBytesConfig":
            name = "bitsandbytes_4bit" if given.load_in_4bit else "bitsandbytes_8bit"
            return cls(name, {}, given, skips_none(SKIPS[1], given.llm_int8_skip_modules))
        raise bad_type(
            "quantization", given, f"one of {', '.join(QUANTIZATIONS)}, or a mapping with a name"
        )

    @property
    def plain(self) -> Any:
        """Plain data that tells it from another one."""
        if self.config is not None:
            text = " ".join(repr(self.config).split())
            return {"config": text, "head": True} if self.head else text
        options = {**self.options, **({"head": True} if self.head else {})}
        return {"name": self.name, **options} if options else self.name


def _require_no_embeddings(config: Any) -> None:
    """Raise ``GenError`` for a ``TorchAoConfig`` by which embeddings are quantised."""
    if config.include_input_output_embeddings:
        raise GenError(
            "include_input_output_embeddings is True; expected False: embeddings keep their dtype,"
            " since torchao would make the whole table of each look-up. {'name': 'int8', 'head':"
            " True}, or modules_to_not_convert=[], quantises the output head"
        )


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


def head_linears(network: nn.Module, heads: Sequence[nn.Linear], name: str) -> dict[str, nn.Linear]:
    """Find the output heads of a network by name.

    Args:
        network: the network.
        heads: layers that make logits of its last states.
        name: name of the model in messages.

    Raises:
        GenError: there are none, or one shares its weight with an embedding.
    """
    if not heads:
        raise GenError(
            f"quantization of model {name} has head true, but no linear layers make its logits;"
            " expected head false"
        )
    paths = {id(m): path for path, m in network.named_modules()}
    found = {}
    for head in heads:
        path = paths[id(head)]
        tied = [
            other
            for other, m in network.named_modules()
            if m is not head and any(p is head.weight for p in m._parameters.values())
        ]
        if tied:
            raise GenError(
                f"quantization of model {name} has head true, but its output head {path} and"
                f" {tied[0]} are one matrix, which keeps its dtype as embeddings do; expected head"
                " false"
            )
        found[path] = head
    return found


def quantize(
    network: nn.Module, how: Quantization, name: str, heads: Sequence[nn.Linear] = ()
) -> None:
    """Quantise the weights of a network where they are.

    Args:
        network: the network, which is changed.
        how: the quantisation.
        name: name of the model in messages.
        heads: layers that make logits of its last states, which ``how`` includes or not.

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
    if how.head:
        chosen |= head_linears(network, heads, name)
    weights = [m.weight for m in chosen.values()]
    dtypes = {path: m.weight.dtype for path, m in chosen.items()}
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
        for path, dtype in dtypes.items():  # the first call tells whether there is a kernel
            m: Any = network.get_submodule(path)
            x = torch.zeros(1, m.in_features, device=weights[0].device, dtype=dtype)
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
