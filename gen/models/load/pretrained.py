"""Load classes of transformers and diffusers from published folders: strictly, with one-line
errors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gen.core.errors import GenError
from gen.models.load.bits_and_bytes import keep_layout, require_rows_apart
from gen.models.load.bounded_text import bounded_tokenizer, require_readable_rules
from gen.models.load.fields import check_fields, check_sizes
from gen.models.load.gguf import GgufFile
from gen.models.load.libraries import LOADING, show_quantizers, transformers
from gen.models.load.locate import quiet, readable
from gen.models.load.reads import note_file, note_folder, note_network
from gen.models.load.tensor_parallel import Ranks
from gen.models.load.weights import require_fit, require_inside, weight_files

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


def pretrained(
    cls: Any,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    device_map: Any = None,
    ranks: Ranks | None = None,
    name: str | Path = "",
    gguf: GgufFile | None = None,
    **more: Any,
) -> Any:
    """Load a model for inference with ``cls.from_pretrained``.

    Args:
        cls: Model class of transformers (or an ``Auto`` one) or of diffusers.
        path: Folder or Hub id.
        device: Target device, without a ``device_map``.
        dtype: Dtype of floating-point weights.
        device_map: Placement by accelerate.
        ranks: Processes of which each holds a part of the weights, on its own device.
        name: Name of the model in messages, by default ``path``.
        gguf: The file of the folder that is the model.
        **more: Further arguments, such as ``variant``, ``max_memory`` or ``trust_remote_code``.

    Raises:
        GenError: Weights are missing, cannot be read, or do not fit the class exactly; or they
            cannot be split.
    """
    folder = Path(path) / more.get("subfolder", "")
    is_local = folder.is_dir()
    if gguf is not None:
        note_file(gguf.path)
        more |= gguf.keywords
    elif is_local and (more.get("variant") or not _has_weight_files(folder)):
        weight_files(folder, more.get("variant"))  # raises the error that lists expected files
    _check_sizes(folder, gguf, str(name or path))
    options = {"torch_dtype" if cls.__module__.startswith("diffusers") else "dtype": dtype, **more}
    if device_map is not None:
        options["device_map"] = device_map
    stored = _stored_quantization(folder)
    if ranks is not None:
        _require_splittable(gguf, stored, str(name or path))
        with readable("model", name or path):
            code = {k: more[k] for k in ("trust_remote_code",) if k in more}
            config = transformers().AutoConfig.from_pretrained(path, local_files_only=True, **code)
        ranks.require_plan(config, str(name or path))
        options |= ranks.keywords
    if stored:  # in few bits, which transformers reads by the package that made them
        show_quantizers()
    with nullcontext() if gguf is None else gguf.read_once():
        model = strictly(cls, path, "model", name or path, **options, local_files_only=is_local)
    if gguf is not None:
        gguf.require_all_read(model)
        model.generation_config.update(**gguf.generation)
    if stored.get("quant_method") == "bitsandbytes":
        require_rows_apart(model.config.quantization_config)
        keep_layout(model)
    model = model.eval().requires_grad_(False)
    return model if device_map is not None or ranks is not None else model.to(device)


def _require_splittable(gguf: Path | None, stored: dict[str, Any], name: str) -> None:
    """Raise ``GenError`` for weights in a format that no plan splits."""
    kind = "in GGUF" if gguf else "by bitsandbytes"
    if gguf is not None or stored.get("quant_method") == "bitsandbytes":
        raise GenError(
            f"model {name} is stored {kind}, which tp cannot split; expected weights in safetensors"
        )


def strictly(cls: Any, path: str | Path, kind: str, name: str | Path = "", **options: Any) -> Any:
    """Call ``cls.from_pretrained(path, **options)`` and require exactly the weights of the class.

    ``kind`` and ``name`` name the model in messages. Raises ``GenError`` for files that cannot be
    read, and lists missing, extra and mis-shaped weights.
    """
    name = name or path
    if "gguf_file" not in options:
        note_folder(Path(path) / options.get("subfolder", ""))
    with LOADING, readable(kind, name), quiet():
        model, info = cls.from_pretrained(
            path, **options, output_loading_info=True, ignore_mismatched_sizes=True
        )
    mis_shaped = [
        f"{k[0]} is {tuple(k[1])}, expected {tuple(k[2])}"
        for k in info.get("mismatched_keys") or ()
    ]
    require_fit(
        f"{kind} {name}",
        type(model),
        {
            "missing": info["missing_keys"],
            "extra": info["unexpected_keys"],
            "mis-shaped": mis_shaped,
        },
    )
    note_network(model)
    return model


def _stored_quantization(folder: Path) -> dict[str, Any]:
    """Return what a local folder's config says about quantised weights; empty for none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the loader says what is wrong with it
        return {}
    return config.get("quantization_config") or {}


def _check_sizes(folder: Path, gguf: GgufFile | None, name: str) -> None:
    """Refuse a config with more layers or wider ones than the weights, and indices that name files
    elsewhere. Raises ``GenError``."""
    if not folder.is_dir():
        return
    if gguf is not None:
        shapes = [[int(side) for side in tensor.shape] for tensor in gguf.header.tensors]
        check_sizes(gguf.config.to_dict(), shapes, gguf.path.name, name)
        return
    stored = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.index.json"):
        with readable("index", index):
            named = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
            require_inside(index, set(named))
    if not stored:
        return
    with readable("model", name):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shapes = []
        for file in stored:
            with safe_open(file, "pt") as opened:
                names = opened.keys()
                shapes += [opened.get_slice(key).get_shape() for key in names]
    check_sizes(config, shapes, "config.json", name)


def _has_weight_files(folder: Path) -> bool:
    """Check for any weights: folders may hold several files of one model, as shards or in several
    precisions."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def tokenizer_of(
    path: str | Path,
    *,
    name: str | Path = "",
    trust_remote_code: bool = False,
    gguf: GgufFile | None = None,
    **more: Any,
) -> Any:
    """Load the tokenizer of a folder with ``AutoTokenizer``, or that of a GGUF file in it; its
    rules run within bounds. Raises ``GenError`` if it cannot be read."""
    more["trust_remote_code"] = trust_remote_code
    if gguf is None:
        note_folder(Path(path), weights=False)
    for file in TOKENIZER_FILES if gguf is not None else ():  # which come before those in it
        if (Path(path) / file).is_file():
            note_file(Path(path) / file)
    stated = Path(path) / "tokenizer_config.json"
    try:
        if stated.is_file():
            said = json.loads(stated.read_text(encoding="utf-8"))
            check_fields(said, stated.name, str(name or path))
        if gguf is not None:
            return bounded_tokenizer(gguf.tokenizer(**more), str(name or path))
        require_readable_rules(Path(path) / "tokenizer.json", str(name or path))
        with quiet():
            tokenizer = transformers().AutoTokenizer.from_pretrained(
                path, local_files_only=True, **more
            )
        return bounded_tokenizer(tokenizer, str(name or path))
    except GenError:
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics that are none
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = " ".join(str(error).split())[:200]
        raise GenError(
            f"the tokenizer of {name or path} cannot be read: {reason}; expected tokenizer.json, or"
            " the files of a tokenizer of transformers"
        ) from None
