"""Read weights of published folders tensor by tensor, rename and check their keys, and fill models.

safetensors are preferred. Pickles (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) are read with
``weights_only=True``: no code of a checkpoint ever runs. A model is built without storage and
filled one tensor at a time, each directly on its device and in its dtype, so loading takes little
more memory than the weights themselves. The mapping from keys of a file to tensors of a model is
data (``Renames``) next to the architecture.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.load.libraries import accelerate
from gen.models.load.locate import readable
from gen.models.load.reads import note_file, note_network

# (regular expression, replacement), applied one after the other to every key
Renames = Sequence[tuple[str, str]]
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# keys under which checkpoints of training scripts store their weights
WRAPPERS = ("model", "module", "state_dict")
SHOWN = 8  # keys of each kind that a message lists


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files with a folder's weights: those of its index if it is sharded, safetensors
    before pickles. The path of a file is returned as it is.

    Raises ``GenError`` for no file, for a missing file of an index, and for an ambiguous choice.
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
            return _files_of_index(index[0])
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        files = [p for p in entries if p.suffix in endings]
        if len(files) > 1:
            raise GenError(
                f"{folder} holds {', '.join(p.name for p in files)}; expected one file of weights,"
                " an index, or the path of one file"
            )
        if files:
            return files
    raise GenError(
        f"{folder} has no weights; expected a file *.safetensors, or"
        f" {', '.join('*' + p for p in PICKLES)}"
    )


def _files_of_index(index: Path) -> list[Path]:
    """Return the files of an index of shards. Raises ``GenError`` for one that is missing."""
    with readable("index", index):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (index.parent / name).is_file():
            raise GenError(
                f"{index} names {name}, which is missing; expected all {len(names)} files in the"
                " index"
            )
    return [index.parent / n for n in names]


class LazyWeights(Mapping[str, Tensor]):
    """Mapping from keys to tensors that are read when they are asked for.

    Attributes:
        shapes: shapes by key, known without reading.
    """

    shapes: dict[str, tuple[int, ...]]


class Weights(LazyWeights):
    """Lazy mapping of the tensors in files."""

    def __init__(self, path: str | Path, wrapper: str | None = None):
        """Open a folder or file.

        ``wrapper``: the key of the weights in a pickle, by default the first of ``WRAPPERS`` in it.
        Raises ``GenError`` for files that cannot be read, and for pickles with more than plain
        tensors.
        """
        self.path = Path(path)
        self._readers: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {}
        self.shapes = {}
        for file in weight_files(path):
            note_file(file)
            with readable("file", file):
                (self._add_safetensors if file.suffix == ".safetensors" else self._add_pickle)(
                    file, wrapper
                )

    def __getitem__(self, key: str) -> Tensor:
        return self._readers[key](torch.clone)

    def __iter__(self):
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, key: object) -> bool:
        return key in self._readers

    def to(self, key: str, device: Any, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor on a device; floating-point tensors get ``dtype``."""
        return self._readers[key](
            lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)
        )

    def _add_safetensors(self, file: Path, wrapper: str | None) -> None:
        # opened again for every tensor, which unmaps the file's pages at once
        def read(key: str, take: Callable[[Tensor], Tensor]) -> Tensor:
            with readable("file", file), safe_open(file, "pt") as opened:
                return take(opened.get_tensor(key))

        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                self.shapes[key] = tuple(opened.get_slice(key).get_shape())
                self._readers[key] = lambda take, key=key: read(key, take)

    def _add_pickle(self, file: Path, wrapper: str | None) -> None:
        content = unpickled(file)
        for key in [wrapper] if wrapper else WRAPPERS:
            if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
                content = content[key]
                break
        items = content.items() if isinstance(content, Mapping) else ()
        tensors = {k: v for k, v in items if isinstance(v, Tensor)}
        if not tensors:
            raise GenError(
                f"{file} has no named tensors; expected some, alone or under {', '.join(WRAPPERS)}"
            )
        for key, value in tensors.items():
            self.shapes[key] = tuple(value.shape)
            self._readers[key] = lambda take, value=value: take(value)


def unpickled(file: Path) -> Any:
    """Read a torch pickle, memory-mapped if its format allows. Raises ``GenError`` for content
    other than plain data."""
    note_file(file)
    # training scripts store their arguments beside the weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # the format before zip archives cannot be mapped
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise GenError(
                f"{file} is not a pickle of plain tensors ({_one_line(error)}); gen reads no file"
                " that could run code; expected tensors only, preferably as safetensors"
            ) from None
        except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
            raise GenError(f"{file} cannot be read: {_one_line(error)}") from None


def without_storage(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module whose parameters have shapes and no storage; its buffers are real."""
    with accelerate().init_empty_weights(include_buffers=False):
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
    """Put weights into a model built ``without_storage``.

    Args:
        model: The model to fill.
        weights: Tensors by key, best as ``Weights``.
        rename: Renames of keys.
        drop: Patterns of renamed keys to ignore.
        optional: Patterns of tensors that the weights may lack, such as tied ones.
        device: Target device, without a ``device_map``.
        dtype: Dtype of floating-point tensors.
        device_map: Placement by accelerate, for models larger than a device.
        name: Name of the weights in messages.

    Raises:
        GenError: Lists missing, extra, repeated and mis-shaped tensors; the model is unchanged.
    """
    name = name or (weights.path if isinstance(weights, Weights) else "")
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    targets = {key: renamed(key, rename) for key in weights}
    targets = {key: target for key, target in targets.items() if not _any(drop, target)}
    counts = Counter(targets.values())
    shapes = shapes_of(weights)
    wrong = {
        "missing": [k for k in expected if k not in counts and not _any(optional, k)],
        "extra": [f"{k} ({t})" if k != t else k for k, t in targets.items() if t not in expected],
        "twice": sorted(target for target, count in counts.items() if count > 1),
        "mis-shaped": [
            f"{k} is {shapes[k]}, expected {expected[target]}"
            for k, target in targets.items()
            if target in expected and shapes[k] != expected[target]
        ],
    }
    require_fit(name, type(model), wrong)
    device_of = _device_by_key(model, device, dtype, device_map)
    for key, target in targets.items():
        _put(model, target, _moved(weights, key, device_of(target), dtype))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if device_map is None:
        model = model.to(device)
    else:
        model = accelerate().dispatch_model(model, _solved(model, dtype, device_map))
    note_network(model)
    return model.eval().requires_grad_(False)


def _put(model: nn.Module, target: str, value: Tensor) -> None:
    """Give a parameter or buffer of a model, by its name in the state dict, a value."""
    module, _, leaf = target.rpartition(".")
    owner = model.get_submodule(module)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return shapes by key, without reading the tensors of lazy mappings."""
    if isinstance(tensors, LazyWeights):
        return tensors.shapes
    return {k: tuple(v.shape) for k, v in tensors.items()}


def require_fit(name: str | Path, cls: type, wrong: Mapping[str, Iterable[str]]) -> None:
    """Raise ``GenError`` with the ``wrong`` keys of weights by kind, if there are any."""
    faults = {kind: sorted(map(str, keys)) for kind, keys in wrong.items() if keys}
    if faults:
        lists = [
            f"{len(v)} {kind}: {', '.join(v[:SHOWN])}{' ...' if len(v) > SHOWN else ''}"
            for kind, v in faults.items()
        ]
        raise GenError(f"the weights of {name} do not fit {cls.__name__}; {'; '.join(lists)}")


def _moved(weights: Mapping[str, Tensor], key: str, device: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(weights, Weights):
        return weights.to(key, device, dtype)
    value = weights[key]
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def renamed(key: str, renames: Renames) -> str:
    """Apply all renames to a key."""
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _device_by_key(
    model: nn.Module, device, dtype: torch.dtype, device_map
) -> Callable[[str], Any]:
    """Return a function from a key to its device. Raises ``GenError`` for modules on disk."""
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
    from gen.models.load.transformers_compat import unsplittable_modules  # imports transformers

    whole = unsplittable_modules(model)
    memory = (
        None
        if device_map == "sequential"
        else accelerate().utils.get_balanced_memory(
            model, dtype=dtype, no_split_module_classes=whole
        )
    )
    return accelerate().infer_auto_device_map(
        model, max_memory=memory, dtype=dtype, no_split_module_classes=whole
    )


def _any(patterns: Iterable[str], key: str) -> bool:
    return any(re.search(p, key) for p in patterns)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
