"""Finding and loading models: a zoo name, a local folder or a hub id. Whatever goes wrong is one
clear line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from gen.core.errors import GenError, unknown

ZOO = Path(__file__).parents[2] / "zoo"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def zoo() -> dict[str, Path]:
    """The embedded models by name."""
    return {p.parent.name: p.parent for p in sorted(ZOO.glob("*/config.json"))}


def locate(name: str | Path, kind: str = "model") -> str | Path:
    """The zoo folder, local folder or hub id that a name means. Raises ``GenError`` if it can be
    none of them."""
    if str(name) in zoo():
        return zoo()[str(name)]
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise GenError(f"{kind} folder {path} has no config.json")
        return path
    text = str(name)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return text  # a hub id
    raise unknown(kind, text, zoo(), "the zoo; it is no folder and no hub id either")


def read_config(name: str | Path) -> dict:
    """A local model's config.json; empty for a hub id."""
    path = locate(name)
    if isinstance(path, str):
        return {}
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise GenError(f"the config of model {name} cannot be read: {error}") from None


def model_kind(name: str | Path) -> str:
    """``latents`` or ``codes``, as a local model's config says."""
    return "latents" if read_config(name).get("latent_channels") else "codes"


@contextlib.contextmanager
def readable(kind: str, path: str | Path):
    """Turns what loaders raise for missing, cut or foreign files into one line that names the
    file's place."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    try:
        yield
    except GenError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        EOFError,
        SafetensorError,
        UnpicklingError,
    ) as error:
        reason = " ".join(str(error).split())
        raise GenError(f"the weights of {kind} {path} cannot be read: {reason[:300]}") from None


@contextlib.contextmanager
def quiet():
    """No progress bars and warnings of the loaders inside."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    kept = transformers_logging.get_verbosity(), diffusers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    diffusers_logging.set_verbosity_error()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(kept[0])
        diffusers_logging.set_verbosity(kept[1])
        if bar:
            transformers_logging.enable_progress_bar()


def pick_device(device: str | torch.device) -> torch.device:
    """The device of that name. Raises ``GenError`` where it does not exist; never another one
    instead."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise unknown("device", device, ["cpu", "cuda", "cuda:0", "mps"]) from None
    if found.type == "cuda" and (
        not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count()
    ):
        raise GenError(
            f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} CUDA"
            " devices; expected 'cpu'"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise GenError("device 'mps' is not there; expected 'cpu'")
    return found


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]
