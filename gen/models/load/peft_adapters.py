"""LoRA adapters in PEFT's layout, added to the weights of a loaded network.

    W' = W + s B A,   s = alpha / r,  or  alpha / sqrt(r) with rsLoRA

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` with the matrices A [r, in]
and B [out, r] of linear layers, by the layers' names. The sum is made in float64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value, cut
from gen.core.plain import is_finite
from gen.models.load.hub import HUB, HubOptions, snapshot_of
from gen.models.load.locate import readable
from gen.models.load.routed import LowRank, RoutedLinear, Router
from gen.models.load.weights import SHOWN, Weights

CONFIG, FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
MOST_REPEATS, LONGEST_PATTERN = 2, 500
PREFIX, ENDS = "base_model.model.", {".lora_A.weight": "A", ".lora_B.weight": "B"}


def read_adapter(folder: str | Path, hub: HubOptions = HUB) -> dict[str, LowRank]:
    """Read a LoRA adapter: its additions in float64, by the names of layers.

    Args:
        folder: folder that ``save_pretrained`` of PEFT wrote, or a hub id.
        hub: options of the model's repository, of which token, cache and a mapping of revisions
            are the adapter's too.

    Raises:
        GenError: there is no adapter, it cannot be read, or is of a kind that is not supported.
    """
    path = _found(folder, hub)
    with readable("adapter", folder):
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    _require_lora(config, folder)
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise GenError(f"adapter {folder} has no weights; expected {' or '.join(FILES)}")
    parts: dict[str, dict[str, Tensor]] = {}
    other = []
    weights = Weights(file)
    for key in weights:
        end = next((e for e in ENDS if key.endswith(e)), None)
        if end is None:
            other.append(key)
            continue
        layer = key.removeprefix(PREFIX).removesuffix(end)
        parts.setdefault(layer, {})[ENDS[end]] = numbers = weights[key].double()
        if not numbers.isfinite().all():
            raise GenError(
                f"adapter {folder} has NaN or infinity in {key}; expected finite numbers"
            )
    halves = [layer for layer, pair in parts.items() if len(pair) < 2]
    if other or halves or not parts:
        named = ", ".join(sorted([*other, *halves])[:SHOWN]) or "no tensors"
        raise GenError(
            f"adapter {folder} has {named}; expected lora_A and lora_B of linear layers alone"
        )
    return {layer: _scaled(layer, pair, config, folder) for layer, pair in parts.items()}


def _found(folder: str | Path, hub: HubOptions) -> Path:
    """Return the folder of an adapter: a local one, or that of a hub id. Raises ``GenError``."""
    path = Path(folder).expanduser()
    if not path.is_dir() and str(folder).count("/") == 1:
        path = snapshot_of(str(folder), hub.of(str(folder), main=False)).path
    if not (path / CONFIG).is_file():
        raise GenError(f"adapter {folder} has no {CONFIG}; expected a folder that PEFT wrote")
    return path


def _require_lora(config: Any, folder: str | Path) -> None:
    """Raise ``GenError`` for an adapter that is more or something else than low-rank matrices."""
    if not isinstance(config, Mapping):
        raise bad_value(f"{CONFIG} of adapter {folder}", config, "an object")
    for key in ("r", "lora_alpha"):
        _require_scale(key, config.get(key), folder)
        patterns = config.get(PATTERNS[key])
        if patterns is not None and not isinstance(patterns, Mapping):
            raise bad_value(f"{PATTERNS[key]} of adapter {folder}", patterns, "an object")
        for pattern, value in (patterns or {}).items():
            _require_pattern(pattern, f"{PATTERNS[key]} of adapter {folder}")
            _require_scale(f"{PATTERNS[key]}[{pattern!r}]", value, folder)
    kind = config.get("peft_type")
    wrong = None if kind == "LORA" else f"peft_type {kind!r}"
    for key in ("use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out", "layer_replication"):
        wrong = wrong or (f"{key} {config[key]!r}" if config.get(key) else None)
    if config.get("bias", "none") != "none":
        wrong = wrong or f"bias {config['bias']!r}"
    if wrong:
        raise GenError(f"adapter {folder} has {cut(wrong)}; expected plain LoRA on linear layers")


def _require_scale(name: str, value: Any, folder: str | Path) -> None:
    """Raise ``GenError`` for a rank or scale that is none."""
    is_rank = name.startswith("r")
    if not is_finite(value) or value <= 0 or (is_rank and not isinstance(value, int)):
        expected = "an integer of at least 1" if is_rank else "a number above 0"
        raise bad_value(f"{name} of adapter {folder}", value, expected)


def _require_pattern(pattern: str, where: str) -> None:
    """Raise ``GenError`` for a regular expression of layers that cannot be read, or that may try
    many ways to match a name."""
    few = sum(map(pattern.count, "*+?{")) <= MOST_REPEATS and len(pattern) <= LONGEST_PATTERN
    try:
        re.compile(pattern)
        is_plain = few and not re.search(r"\)[*+?{]|\\[1-9gk]|\(\?P", pattern)
    except (re.error, OverflowError, RecursionError):
        is_plain = False
    if not is_plain:
        raise bad_value(where, pattern, "names of layers, with at most two repetitions each")


def _scaled(
    layer: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], folder: str | Path
) -> LowRank:
    """Return the addition of a layer with its scale. Raises ``GenError`` for a wrong rank."""
    a, b = pair["A"], pair["B"]

    def of(pattern: str, usual: str) -> Any:
        table = config.get(pattern) or {}
        found = (v for k, v in table.items() if re.match(rf"(.*\.)?({k})$", layer))
        return next(found, config.get(usual))

    rank, alpha = of(PATTERNS["r"], "r"), of(PATTERNS["lora_alpha"], "lora_alpha")
    if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
        raise GenError(
            f"adapter {folder} has matrices {tuple(a.shape)} and {tuple(b.shape)} for layer"
            f" {layer}; expected rank {rank}, as its config says"
        )
    return LowRank(a, b * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


def layers_of(
    network: nn.Module, additions: Mapping[str, LowRank], folder: str | Path, name: str
) -> dict[str, nn.Linear]:
    """Find the layers of a network that an adapter adds to, by name.

    Args:
        network: the network.
        additions: the adapter.
        folder: name of the adapter in messages.
        name: name of the model in messages.

    Raises:
        GenError: the network lacks a layer, or has it in another shape: the adapter is another
            model's.
    """
    linears = {k: m for k, m in network.named_modules() if isinstance(m, nn.Linear)}
    wrong = []
    for layer, x in additions.items():
        shape = (len(x.b), x.a.shape[1])
        if layer not in linears:
            wrong.append(f"{layer}, which the model lacks")
        elif tuple(linears[layer].weight.shape) != shape:
            wrong.append(f"{layer} {shape}, expected {tuple(linears[layer].weight.shape)}")
    if wrong:
        rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise GenError(
            f"adapter {folder} does not fit model {name}: it adds to {'; '.join(wrong[:3])}{rest}"
        )
    return {layer: linears[layer] for layer in additions}


@torch.no_grad()
def merge(network: nn.Module, folder: str | Path, name: str, hub: HubOptions = HUB) -> None:
    """Add an adapter to the weights of a network.

    Args:
        network: the network, which is changed.
        folder: the adapter.
        name: name of the model in messages.
        hub: as of ``read_adapter``.

    Raises:
        GenError: the adapter cannot be read, or does not fit, and the network is unchanged; or the
            sum is more than its type holds.
    """
    additions = read_adapter(folder, hub)
    layers = layers_of(network, additions, folder, name)
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    for layer, linear in layers.items():
        if linear.weight.device.type == "meta":
            raise GenError(
                f"layer {layer} of model {name} is offloaded; expected another device_map"
            )
        if id(linear.weight) in tables:
            raise GenError(
                f"adapter {folder} adds to {layer}, whose weight is that of the embedding of model"
                f" {name} too; expected layers with weights of their own"
            )
    for layer, linear in layers.items():
        x, weight = additions[layer], linear.weight
        total = weight.double() + (x.b @ x.a).to(weight.device)
        _require_finite(total.to(weight.dtype), layer, folder)
        weight.copy_(total)


def _require_finite(weight: Tensor, layer: str, folder: str | Path) -> None:
    """Raise ``GenError`` for a weight that its type does not hold."""
    if not weight.isfinite().all():
        kind = str(weight.dtype).removeprefix("torch.")
        raise GenError(
            f"adapter {folder} makes the weight of {layer} infinite in {kind}; expected smaller"
            " numbers, or another dtype"
        )


@torch.no_grad()
def route(network: nn.Module, folders: Mapping[str, str], name: str, hub: HubOptions = HUB) -> None:
    """Put adapters on a network, side by side.

    Args:
        network: the network, whose layers are replaced.
        folders: folder of each adapter by name.
        name: name of the model in messages.
        hub: as of ``read_adapter``.

    Raises:
        GenError: an adapter cannot be read, or does not fit; the network is unchanged.
    """
    read = {key: read_adapter(folder, hub) for key, folder in folders.items()}
    layers: dict[str, nn.Linear] = {}
    for key, folder in folders.items():
        layers |= layers_of(network, read[key], folder, name)
    router = Router(tuple(folders))
    for path, linear in layers.items():
        owner, _, leaf = path.rpartition(".")
        added = [read[key].get(path) for key in folders]
        setattr(network.get_submodule(owner), leaf, RoutedLinear(linear, added, router))
