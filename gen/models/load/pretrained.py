"""Loading classes of transformers and diffusers from folders that others wrote: strictly, and with
one line for whatever goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gen.core.errors import GenError
from gen.models.load.locate import quiet, readable
from gen.models.load.weights import require_fit, weight_files


def pretrained(
    cls: Any,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    device_map: Any = None,
    name: str | Path = "",
    **more: Any,
) -> Any:
    """``cls.from_pretrained`` of a folder, for a model class of transformers (or an ``Auto`` one)
    or of diffusers. ``more``: passed on, such as ``subfolder`` or ``trust_remote_code``. Raises
    ``GenError`` for weights that are not there, cannot be read, or are not exactly those of the
    class.
    """
    folder = Path(path) / more.get("subfolder", "")
    local = folder.is_dir()
    if local and not _sharded(folder):
        weight_files(folder)  # says what is expected where there are none
    ours = {"torch_dtype": dtype} if cls.__module__.startswith("diffusers") else {"dtype": dtype}
    placed = {} if device_map is None else {"device_map": device_map}
    model = (
        strictly(cls, path, "model", name or path, **ours, **placed, **more, local_files_only=local)
        .eval()
        .requires_grad_(False)
    )
    return model if device_map is not None else model.to(device)


def strictly(cls: Any, path: str | Path, kind: str, name: str | Path = "", **options: Any) -> Any:
    """``cls.from_pretrained(path, **options)`` of either library with exactly the weights that the
    class has. ``kind`` and ``name``: what messages call it. Raises ``GenError`` for what cannot be
    read, and lists what is missing, extra or of another shape.
    """
    name = name or path
    with readable(kind, name), quiet():
        model, info = cls.from_pretrained(
            path, **options, output_loading_info=True, ignore_mismatched_sizes=True
        )
    shaped = [
        f"{k[0]} is {tuple(k[1])}, expected {tuple(k[2])}"
        for k in info.get("mismatched_keys") or ()
    ]
    require_fit(
        f"{kind} {name}",
        type(model),
        {"missing": info["missing_keys"], "extra": info["unexpected_keys"], "mis-shaped": shaped},
    )
    return model


def _sharded(folder: Path) -> bool:
    """Folders of these libraries may hold several files of one model: sharded, or of several
    precisions."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def chats(tokenizer: Any, chat: bool | None, name: str | Path) -> bool:
    """Whether prompts go into the tokenizer's chat template: as said, or where it has one. Raises
    ``GenError`` if that is asked for and it has none."""
    if chat and not tokenizer.chat_template:
        raise GenError(f"the tokenizer of {name} has no chat template; expected chat=False")
    return bool(tokenizer.chat_template) if chat is None else chat


def said_by_user(tokenizer: Any, text: str) -> list[int]:
    """The ids of a chat in which the user has said a text and the answer is about to begin."""
    said = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )


def tokenizer_of(
    path: str | Path, *, name: str | Path = "", trust_remote_code: bool = False, **more: Any
) -> Any:
    """The tokenizer of a folder, by ``AutoTokenizer``. Raises ``GenError`` where there is none that
    can be read."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code, **more
            )
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise GenError(
            f"the tokenizer of {name or path} cannot be read: {reason}; expected tokenizer.json, or"
            " the files of a tokenizer of transformers"
        ) from None
