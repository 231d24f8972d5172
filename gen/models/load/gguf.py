"""Models in GGUF, the format of llama.cpp, read by transformers.

transformers turns the metadata of the file into a config and a tokenizer, and its tensors into
weights of the dtype that was asked for: in memory the model is as large as any other, and decodes
in the same way. What transformers would pass over in silence is refused here: scaled rotations, and
tensors that its class has no parameter for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from gen.core.errors import GenError
from gen.media.containers import require_package
from gen.models.load.libraries import LOADING, transformers
from gen.models.load.locate import quiet

ENDING = ".gguf"
MAGIC = b"GGUF"  # first bytes of a file
SHOWN = 8  # names that a message lists


def require_gguf(file: Path, name: str) -> Any:
    """Return the header of a GGUF file, a ``gguf.GGUFReader``.

    Args:
        file: the file.
        name: name of the model in messages.

    Raises:
        GenError: the package gguf is missing, or the file is missing, something else, cut off, or
            one part of several.
    """
    if not file.is_file():
        inside = sorted(p.name for p in file.parent.glob(f"*{ENDING}"))
        raise GenError(
            f"model {name} has no file {file.name}; expected"
            f" {'one of ' + ', '.join(inside[:SHOWN]) if inside else 'a GGUF file'}"
        )
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise GenError(
            f"model {name}: {file} is no GGUF file, it begins with {start!r}; expected {MAGIC!r}"
        )
    library = require_package("gguf", '"gen-toolkit[gguf]"', "a GGUF file")
    try:
        header = library.GGUFReader(file)
    except Exception as error:  # numpy's and gguf's own, of a file that is cut off
        reason = " ".join(str(error).split())[:200]
        raise GenError(
            f"model {name}: {file} cannot be read: {type(error).__name__}: {reason}"
        ) from None
    parts = _value(header, "split.count")
    if parts is not None and parts > 1:
        raise GenError(
            f"model {name}: {file} is one of {parts} parts; expected a file with the whole model"
            " (llama-gguf-split --merge makes one)"
        )
    return header


def gguf_config(file: Path, name: str) -> dict[str, Any]:
    """Return the config that transformers makes of a file's metadata.

    Args:
        file: the file.
        name: name of the model in messages.

    Raises:
        GenError: as of ``require_gguf``; or transformers does not know the architecture, or would
            leave its scaled rotations out.
    """
    header = require_gguf(file, name)
    kind = _value(header, "general.architecture")
    try:
        with quiet():
            config = transformers().AutoConfig.from_pretrained(
                file.parent, gguf_file=file.name, local_files_only=True
            )
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise GenError(
            f"model {name}: transformers cannot read the GGUF architecture {kind!r}: {reason}"
        ) from None
    scaling = _value(header, f"{kind}.rope.scaling.type")
    rotations = config.get_text_config().rope_parameters or {}
    if scaling not in (None, "none") and rotations.get("rope_type", "default") == "default":
        raise GenError(
            f"model {name}: {file} scales rotations ({kind}.rope.scaling.type {scaling!r}), which"
            " transformers does not read from GGUF; expected the folder with the model's"
            " safetensors"
        )
    return config.to_dict()


def dequantize_keywords() -> dict[str, Any]:
    """Return the keywords of ``from_pretrained`` by which weights get the dtype asked for.

    Newer versions of transformers can keep the blocks of some architectures, with kernels that they
    download; older ones always dequantise.
    """
    make = getattr(transformers(), "GgufConfig", None)
    return {} if make is None else {"quantization_config": make(dequantize=True)}


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Read GGUF files without the progress bar of transformers, which has no switch."""
    with LOADING:
        module = import_module("transformers.modeling_gguf_pytorch_utils")
        bar = module.tqdm
        module.tqdm = lambda tensors, **_: tensors
        try:
            yield
        finally:
            module.tqdm = bar


def tokens_of_file(file: Path, tokenizer: Any, name: str) -> Any:
    """Return a tokenizer without the tokens that its file does not have.

    The classes of transformers add those that they have by default, such as GPT-2's
    ``<|endoftext|>``, and the model has no embeddings for them.
    """
    listed = require_gguf(file, name).get_field("tokenizer.ggml.tokens")
    if listed is None or len(tokenizer) <= len(listed.data):
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [x for x in state["added_tokens"] if x["id"] < len(listed.data)]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


def require_all_read(file: Path, network: nn.Module, name: str) -> None:
    """Raise ``GenError`` if a file holds numbers that the network has no parameter for."""
    tensors = require_gguf(file, name).tensors
    stored = sum(int(x.n_elements) for x in tensors)
    weights = {id(x): x for x in network.state_dict(keep_vars=True).values()}  # shared ones once
    used = sum(x.numel() for x in weights.values())
    if stored != used:
        names = [str(x.name) for x in tensors if not str(x.name).startswith("blk.")]
        raise GenError(
            f"model {name}: {file} holds {stored} numbers, and {type(network).__name__} of"
            f" transformers takes {used}; beside its blocks the file has"
            f" {', '.join(names[:SHOWN])} (rope_freqs scales rotations). Expected the folder with"
            " the model's safetensors"
        )


def _value(header: Any, key: str) -> Any:
    """Return a value of the metadata; None without it."""
    field = header.get_field(key)
    return None if field is None else field.contents()
