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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gen.core.errors import GenError, cut, shown
from gen.core.paths import is_file
from gen.models.load.libraries import accelerate
from gen.models.load.locate import NO_TENSORS, readable
from gen.models.load.reads import PICKLES, note_file, note_network

# (regular expression, replacement), applied one after the other to every key
Renames = Sequence[tuple[str, str]]
# keys under which checkpoints of training scripts store their weights
WRAPPERS = ("model", "module", "state_dict")
SHOWN = 8  # keys of each kind that a message lists


def is_variant(file: Path, variant: str | None = None) -> bool:
    """Return True for a file of weights of a variant, such as ``model.fp16.safetensors`` or
    ``model-00001-of-00002.fp16.safetensors`` of ``fp16``."""
    behind = file.stem.partition(".")[2]
    return behind == variant or behind.startswith(f"{variant}-0")


def weight_files(folder: str | Path, variant: str | None = None) -> list[Path]:
    """Return the files with a folder's weights: those of its index if it is sharded, safetensors
    before pickles. The path of a file is returned as it is.

    Args:
        folder: the folder, or a file.
        variant: name of the files to read, as in ``from_pretrained``; None for those without one.

    Raises ``GenError`` for no file, for a missing file of an index, and for an ambiguous choice.
    """
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    for endings in ((".safetensors",), PICKLES):
        ending = f".index.{variant}.json" if variant else ".index.json"
        index = [
            p
            for p in sorted(folder.glob(f"*{ending}"))
            if p.name.removesuffix(ending).endswith(endings)
        ]
        if index:
            return _files_of_index(index[0])
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        files = [p for p in entries if p.suffix in endings]
        if variant:
            files = [p for p in files if is_variant(p, variant)]
        elif len(files) > 1:  # those that are a variant of another one were not asked for
            stems = {p.stem for p in files}
            files = [p for p in files if p.stem.rpartition(".")[0] not in stems]
        if len(files) > 1:
            raise GenError(
                f"{folder} holds {', '.join(p.name for p in files)}; expected one file of weights,"
                " an index, or the path of one file"
            )
        if files:
            return files
    dot = f".{variant}" if variant else ""
    raise GenError(
        f"{folder} has no weights{f' of the variant {variant!r}' if variant else ''}; expected a"
        f" file *{dot}.safetensors, or {', '.join(f'*{dot}{p}' for p in PICKLES)}"
    )


def _files_of_index(index: Path) -> list[Path]:
    """Return the files of an index of shards. Raises ``GenError`` for one that is missing."""
    with readable("index", index):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    require_inside(index, names)
    if not names:
        raise GenError(f"{index} names no files; expected those of the weights")
    for name in names:
        if not is_file(index.parent / name):
            raise GenError(
                f"{index} names {cut(name)}, which is missing; expected all {len(names)} files in"
                " the index"
            )
    return [index.parent / n for n in names]


def require_inside(index: Path, names: Iterable[Any]) -> None:
    """Refuse an index of shards that names files elsewhere than beside it. Raises ``GenError``."""
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".."):
            raise GenError(f"{index} names {shown(name)}; expected the name of a file beside it")


class LazyWeights(Mapping[str, Tensor]):
    """Mapping from keys to tensors that are read when they are asked for.

    Attributes:
        shapes: shapes by key, known without reading.
    """

    shapes: dict[str, tuple[int, ...]]


class Weights(LazyWeights):
    """Lazy mapping of the tensors in files."""

    def __init__(self, path: str | Path, wrapper: str | None = None, variant: str | None = None):
        """Open a folder or file.

        ``wrapper``: the key of the weights in a pickle, by default the first of ``WRAPPERS`` in it.
        ``variant``: as of ``weight_files``.
        Raises ``GenError`` for files that cannot be read, and for pickles with more than plain
        tensors.
        """
        self.path = Path(path)
        self._readers: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {}
        self.shapes = {}
        for file in weight_files(path, variant):
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
        except pickle.UnpicklingError:  # its text tells how to run the code
            raise GenError(f"{file} is {NO_TENSORS}") from None
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
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | Path | None = None,
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
        max_memory: Most memory of each device, as in accelerate.
        offload_folder: Folder of the weights that the device map leaves on disk.
        name: Name of the weights in messages.

    Raises:
        GenError: Lists missing, extra, repeated and mis-shaped tensors; the model is unchanged.
    """
    name = name or (weights.path if isinstance(weights, Weights) else "")
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    targets = {key: renamed(key, rename) for key in weights}
    targets = {key: target for key, target in targets.items() if not _any(drop, target)}
    wrong = _misfits(expected, targets, shapes_of(weights), optional)
    require_fit(name, type(model), wrong)
    solved = None if device_map is None else _solved(model, dtype, device_map, max_memory)
    on_disk = _put_all(
        model,
        {target: partial(_moved, weights, key, dtype=dtype) for key, target in targets.items()},
        _device_by_key(device, solved, offload_folder),
        str(offload_folder),
    )
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if solved is None:
        model = model.to(device)
    else:
        folder = str(offload_folder) if on_disk else None
        model = accelerate().dispatch_model(model, solved, offload_dir=folder)
    note_network(model)
    return model.eval().requires_grad_(False)


def require_in_memory(network: nn.Module, beside: Iterable[str], name: str) -> None:
    """Raise ``GenError`` where weights are on disk that a network reads beside its modules: its
    own parameters, and those of the modules named in ``beside``. ``name`` names the model."""
    read = dict(network._parameters)
    for path in beside:
        read |= {f"{path}.{k}": p for k, p in network.get_submodule(path)._parameters.items()}
    on_disk = [key for key, p in read.items() if p is not None and p.is_meta]
    if on_disk:
        raise GenError(
            f"the device map leaves {', '.join(on_disk[:SHOWN])} of model {name} on disk, which"
            " its network reads beside its modules; expected them in memory, or more max_memory"
        )


def _misfits(
    expected: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Iterable[str],
) -> dict[str, list[str]]:
    """Collect what does not fit, by kind.

    Args:
        expected: shapes of the model by name in the state dict.
        targets: name in the state dict by key of the weights.
        shapes: shapes of the weights by key.
        optional: patterns of tensors that the weights may lack.
    """
    counts = Counter(targets.values())
    return {
        "missing": [k for k in expected if k not in counts and not _any(optional, k)],
        "extra": [f"{k} ({t})" if k != t else k for k, t in targets.items() if t not in expected],
        "twice": sorted(target for target, count in counts.items() if count > 1),
        "mis-shaped": [
            f"{k} is {shapes[k]}, expected {expected[target]}"
            for k, target in targets.items()
            if target in expected and shapes[k] != expected[target]
        ],
    }


def _put_all(
    model: nn.Module,
    reads: Mapping[str, Callable[..., Tensor]],
    device_of: Callable[[str], Any],
    offload_folder: str,
) -> bool:
    """Read every tensor of a model, and return whether some of them went to the disk.

    Args:
        model: the model.
        reads: functions of a device that read the tensors, by name in the state dict.
        device_of: function from the name to the device, or ``disk``.
        offload_folder: folder of the tensors on disk.
    """
    parameters = dict(model.named_parameters())
    index: dict[str, Any] = {}  # accelerate's, of the files in the folder
    for target, read in reads.items():
        device = device_of(target)
        value = read(device="cpu" if device == "disk" else device)
        if device == "disk" and target in parameters:  # buffers stay in memory
            accelerate().utils.offload_weight(value, target, offload_folder, index)
        else:
            _put(model, target, value)
    if index:
        accelerate().utils.offload.save_offload_index(index, offload_folder)
    return bool(index)


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
    faults = {
        kind: [cut(" ".join(key.split())) for key in sorted(map(str, keys))]
        for kind, keys in wrong.items()
        if keys
    }
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
    device: Any, solved: Mapping[str, Any] | None, offload_folder: str | Path | None
) -> Callable[[str], Any]:
    """Return a function from a key to its device. Raises ``GenError`` for modules on disk without
    a folder for them."""
    if solved is None:
        return lambda key: device
    if "disk" in solved.values():
        if offload_folder is None:
            raise GenError(
                "the device map leaves modules on disk; expected devices with room for all of the"
                " model, or an offload_folder"
            )
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    longest = sorted(solved, key=len, reverse=True)
    return lambda key: next(
        (solved[m] for m in longest if not m or key == m or key.startswith(m + ".")), device
    )


def _solved(
    model: nn.Module,
    dtype: torch.dtype,
    device_map: str | Mapping,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> Mapping:
    if isinstance(device_map, Mapping):
        return device_map
    from gen.models.load.transformers_compat import unsplittable_modules  # imports transformers

    whole = unsplittable_modules(model)
    most = None if max_memory is None else dict(max_memory)
    if device_map != "sequential":
        most = accelerate().utils.get_balanced_memory(
            model,
            max_memory=most,
            dtype=dtype,
            no_split_module_classes=whole,
            low_zero=device_map == "balanced_low_0",
        )
    return accelerate().infer_auto_device_map(
        model, max_memory=most, dtype=dtype, no_split_module_classes=whole
    )


def _any(patterns: Iterable[str], key: str) -> bool:
    return any(re.search(p, key) for p in patterns)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
