"""Weights as they lie in published folders: found, read tensor by tensor, renamed and checked, in
any of the usual wrappings.

safetensors come first. Pickles (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) are read with
``weights_only=True``: no code of a checkpoint ever runs. A model is built without storage and
filled one tensor at a time, each on its device and in its type at once, so that loading takes
little more memory than the weights themselves. Which key of a file is which tensor of a model is
data (``Renames``) and lies next to the architecture.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.load.locate import readable

Renames = Sequence[
    tuple[str, str]
]  # (regular expression, replacement), applied one after the other to every key
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WRAPPERS = (
    "model",
    "module",
    "state_dict",
)  # what checkpoints of training scripts put their weights under
SHOWN = 8  # keys that a message lists of each kind


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold a folder's weights: those of its index where it is sharded, safetensors
    before pickles. A path of a file is itself.

    Raises ``GenError`` where there are none, where an index names one that is not there, or where
    several might be meant.
    """
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    for endings in ((".safetensors",), PICKLES):
        index = [
            p
            for p in sorted(folder.glob("*.index.json"))
            if p.name.removesuffix(".index.json").endswith(endings)
        ]
        if index:
            return _of_index(index[0])
        found = (
            [p for p in sorted(folder.iterdir()) if p.suffix in endings] if folder.is_dir() else []
        )
        if len(found) > 1:
            raise GenError(
                f"{folder} holds {', '.join(p.name for p in found)}; expected one file of weights,"
                " an index, or the path of the file meant"
            )
        if found:
            return found
    raise GenError(
        f"{folder} holds no weights; expected a file *.safetensors, or"
        f" {', '.join('*' + p for p in PICKLES)}"
    )


def _of_index(index: Path) -> list[Path]:
    with readable("index", index):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (index.parent / name).is_file():
            raise GenError(
                f"{index} names {name}, which is not there; expected all {len(names)} files that it"
                " names"
            )
    return [index.parent / n for n in names]


class Weights(Mapping):
    """Tensors by key, read when they are asked for. ``shapes``: of all keys, without reading
    them."""

    def __init__(self, where: str | Path, wrapper: str | None = None):
        """``where``: a folder or file. ``wrapper``: the key that holds the weights in a pickle, by
        default what ``WRAPPERS`` has of it. Raises ``GenError`` for files that cannot be read, and
        for pickles of more than plain tensors.
        """
        self.where = Path(where)
        self._use: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(where):
            with readable("file", file):
                (self._add_safetensors if file.suffix == ".safetensors" else self._add_pickle)(
                    file, wrapper
                )

    def __getitem__(self, key: str) -> Tensor:
        return self._use[key](torch.clone)

    def __iter__(self):
        return iter(self._use)

    def __len__(self) -> int:
        return len(self._use)

    def __contains__(self, key: object) -> bool:
        return key in self._use

    def to(self, key: str, device: Any, dtype: torch.dtype) -> Tensor:
        """A tensor on a device, of a type if it is one of floats, and no part of the file."""
        return self._use[key](
            lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)
        )

    def _add_safetensors(self, file: Path, wrapper: str | None) -> None:
        from safetensors import safe_open

        def use(
            key: str, take: Callable[[Tensor], Tensor]
        ) -> (
            Tensor
        ):  # opened anew for every tensor: what is mapped of the file is given back at once
            with readable("file", file), safe_open(file, "pt") as opened:
                return take(opened.get_tensor(key))

        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                self.shapes[key] = tuple(opened.get_slice(key).get_shape())
                self._use[key] = lambda take, key=key: use(key, take)

    def _add_pickle(self, file: Path, wrapper: str | None) -> None:
        found = unpickled(file)
        for key in [wrapper] if wrapper else WRAPPERS:
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                found = found[key]
                break
        tensors = (
            {k: v for k, v in found.items() if isinstance(v, Tensor)}
            if isinstance(found, Mapping)
            else {}
        )
        if not tensors:
            raise GenError(
                f"{file} holds no tensors by name; expected some, alone or under"
                f" {', '.join(WRAPPERS)}"
            )
        for key, value in tensors.items():
            self.shapes[key], self._use[key] = (
                tuple(value.shape),
                lambda take, value=value: take(value),
            )


def unpickled(file: Path) -> Any:
    """What a pickle of torch holds, mapped and not read where its format allows. Raises
    ``GenError`` for one of more than plain data."""
    import pickle

    with torch.serialization.safe_globals(
        [argparse.Namespace]
    ):  # the settings that training scripts keep beside their weights
        try:
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # the format before zip archives cannot be mapped
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise GenError(
                f"{file} is no pickle of plain tensors ({_one_line(error)}); gen reads nothing that"
                " could run code: expected tensors alone, best as safetensors"
            ) from None
        except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
            raise GenError(f"{file} cannot be read: {_one_line(error)}") from None


def without_storage(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that ``make`` builds, with parameters that have shapes and no storage. Its buffers
    that belong to no checkpoint are real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return make()


def fill(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    rename: Renames = (),
    drop: Iterable[str] = (),
    optional: Iterable[str] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    device_map: str | Mapping | None = None,
    name: str | Path = "",
) -> nn.Module:
    """Puts weights into a model built ``without_storage``. ``drop``: patterns of keys (renamed
    ones) that nothing needs; ``optional``: of tensors that a file may lack, such as tied ones.
    ``device_map``: as in accelerate, for models larger than a device. Floating-point tensors get
    ``dtype``.

    Raises ``GenError`` that lists what is missing, extra or of another shape; the model is
    untouched then.
    """
    name = name or getattr(weights, "where", "")
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    own = {key: renamed(key, rename) for key in weights}
    own = {key: to for key, to in own.items() if not _any(drop, to)}
    twice = (
        sorted({to for to in own.values() if list(own.values()).count(to) > 1})
        if len(set(own.values())) < len(own)
        else []
    )
    shapes = getattr(weights, "shapes", None) or {k: tuple(v.shape) for k, v in weights.items()}
    wrong = {
        "missing": [k for k in wanted if k not in set(own.values()) and not _any(optional, k)],
        "extra": [f"{k} ({to})" if k != to else k for k, to in own.items() if to not in wanted],
        "twice": twice,
        "mis-shaped": [
            f"{k} is {shapes[k]}, expected {wanted[to]}"
            for k, to in own.items()
            if to in wanted and shapes[k] != wanted[to]
        ],
    }
    require_fit(name, type(model), wrong)
    positions = _places(model, device, dtype, device_map)
    for key, to in own.items():
        value = _moved(weights, key, positions(to), dtype)
        module, _, leaf = to.rpartition(".")
        owner = model.get_submodule(module)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[leaf] = value
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if device_map is None:
        model = model.to(device)
    else:
        from accelerate import dispatch_model

        model = dispatch_model(model, _solved(model, dtype, device_map))
    return model.eval().requires_grad_(False)


def require_fit(name: str | Path, cls: type, wrong: Mapping[str, Iterable[str]]) -> None:
    """Raises ``GenError`` that lists what is ``wrong`` with weights, by kind, if anything is."""
    found = {kind: sorted(map(str, keys)) for kind, keys in wrong.items() if keys}
    if found:
        lists = [
            f"{len(v)} {kind}: {', '.join(v[:SHOWN])}{' ...' if len(v) > SHOWN else ''}"
            for kind, v in found.items()
        ]
        raise GenError(f"the weights of {name} do not fit {cls.__name__}; {'; '.join(lists)}")


def _moved(weights: Mapping[str, Tensor], key: str, device: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(weights, Weights):
        return weights.to(key, device, dtype)
    value = weights[key]
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def renamed(key: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _places(model: nn.Module, device, dtype: torch.dtype, device_map) -> Callable[[str], Any]:
    if device_map is None:
        return lambda key: device
    solved = _solved(model, dtype, device_map)
    if "disk" in solved.values():
        raise GenError(
            "the device map leaves modules on disk; expected devices with room for all of the model"
        )
    longest = sorted(solved, key=len, reverse=True)
    return lambda key: next(
        (solved[m] for m in longest if not m or key == m or key.startswith(m + ".")), device
    )


def _solved(model: nn.Module, dtype: torch.dtype, device_map: str | Mapping) -> Mapping:
    if isinstance(device_map, Mapping):
        return device_map
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = getattr(model, "_no_split_modules", None)
    memory = (
        None
        if device_map == "sequential"
        else get_balanced_memory(model, dtype=dtype, no_split_module_classes=whole)
    )
    return infer_auto_device_map(
        model, max_memory=memory, dtype=dtype, no_split_module_classes=whole
    )


def _any(patterns: Iterable[str], key: str) -> bool:
    return any(re.search(p, key) for p in patterns)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
