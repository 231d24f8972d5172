"""Loading classes of transformers and diffusers from folders that others wrote: strictly, and with one line for whatever goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gen.errors import GenError
from gen.models.loading import quiet, readable
from gen.models.weights import SHOWN, weight_files


def pretrained(cls: Any, path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, device_map: Any = None,
               name: str | Path = "", **more: Any) -> Any:
    """``cls.from_pretrained`` of a local folder, for a model class of transformers (or an ``Auto`` one) or of diffusers. ``more``: passed on, such as
    ``subfolder`` or ``trust_remote_code``. Raises ``GenError`` for weights that are not there, cannot be read, or are not exactly those of the class."""
    name = name or path
    folder = Path(path) / more.get("subfolder", "")
    with readable("model", name):
        weight_files(folder) if not _sharded(folder) else None
    ours = {"torch_dtype": dtype} if cls.__module__.startswith("diffusers") else {"dtype": dtype}
    placed = {} if device_map is None else {"device_map": device_map}
    with readable("model", name), quiet():
        model, info = cls.from_pretrained(path, **ours, **placed, **more, output_loading_info=True, local_files_only=True,
                                          ignore_mismatched_sizes=True)
    wrong = {kind: sorted(str(k) for k in info.get(key) or ()) for kind, key in
             (("missing", "missing_keys"), ("extra", "unexpected_keys"), ("mis-shaped", "mismatched_keys"))}  # fmt: skip
    if any(wrong.values()):
        lists = [f"{len(v)} {kind}: {', '.join(v[:SHOWN])}{' ...' if len(v) > SHOWN else ''}" for kind, v in wrong.items() if v]
        raise GenError(f"the weights of {name} do not fit {type(model).__name__}; {'; '.join(lists)}")
    model = model.eval().requires_grad_(False)
    return model if device_map is not None else model.to(device)


def _sharded(folder: Path) -> bool:
    """Folders of these libraries may hold several files of one model: sharded, or of several precisions."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def chats(tokenizer: Any, chat: bool | None, name: str | Path) -> bool:
    """Whether prompts go into the tokenizer's chat template: as said, or where it has one. Raises ``GenError`` if that is asked for and it has none."""
    if chat and not tokenizer.chat_template:
        raise GenError(f"the tokenizer of {name} has no chat template; expected chat=False")
    return bool(tokenizer.chat_template) if chat is None else chat


def said_by_user(tokenizer: Any, text: str) -> list[int]:
    """The ids of a chat in which the user has said a text and the answer is about to begin."""
    said = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"])


def tokenizer_of(path: str | Path, *, name: str | Path = "", trust_remote_code: bool = False, **more: Any) -> Any:
    """The tokenizer of a folder, by ``AutoTokenizer``. Raises ``GenError`` where there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **more)
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise GenError(f"the tokenizer of {name or path} cannot be read: {reason}; expected tokenizer.json, or the files of a tokenizer of transformers") from None
