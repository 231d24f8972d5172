"""Models in GGUF, the format of llama.cpp, read by transformers.

transformers turns the metadata of the file into a config and a tokenizer, and its tensors into
weights of the dtype that was asked for: in memory the model is as large as any other, and decodes
in the same way. What transformers would pass over in silence is refused here: scaled rotations, and
tensors that its class has no parameter for.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

from gen.core.errors import GenError, bad_value, cut, shown
from gen.media.containers import require_package
from gen.models.load.gguf_reader import (
    TOKENS,
    has_own_reader,
    read_header,
    read_once,
    without_vocabulary,
)
from gen.models.load.libraries import transformers
from gen.models.load.locate import quiet

ENDING = ".gguf"
MAGIC = b"GGUF"  # first bytes of a file
SHOWN = 8  # names that a message lists
ENDS = ("eos", "eot", "eom")  # tokens that end a text, a turn, a message
KINDS = {  # of metadata that is read here, by the end of the key
    "_token_id": int, "split.count": int, "general.architecture": str, "chat_template": str,
    "rope.scaling.type": str, "general.license": str,
}  # fmt: skip
SAMPLING = "general.sampling."  # how keys of the author's sampling parameters begin
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


class GgufFile:
    """A model in a GGUF file, whose header is read once, when it is first needed.

    Attributes:
        path: the file.
        name: name of the model in messages.
    """

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name

    @cached_property
    def library(self) -> ModuleType:
        """The package gguf. Raises ``GenError`` if it is missing."""
        return require_package("gguf", '"gen-toolkit[gguf]"', "a GGUF file")

    @cached_property
    def header(self) -> Any:
        """Header of the file without its vocabulary, a ``gguf.GGUFReader``.

        Raises:
            GenError: the package gguf is missing, or the file is missing, something else, cut off,
                or one part of several.
        """
        header = self._read()
        for key in header.fields:
            kind = next((kind for end, kind in KINDS.items() if str(key).endswith(end)), None)
            if kind is not None and not isinstance(_value(header, key), kind):
                expected = "a text" if kind is str else "an integer"
                raise bad_value(f"{key} of model {self.name}", _value(header, key), expected)
        parts = _value(header, "split.count")
        if parts is not None and parts > 1:
            raise GenError(
                f"model {self.name}: {self.path} is one of {parts} parts; expected a file with the"
                " whole model (llama-gguf-split --merge makes one)"
            )
        listed = header.get_field(TOKENS)
        self.vocabulary = None if listed is None else len(listed.data)
        return without_vocabulary(header)

    def _read(self) -> Any:
        """Read the header with all that it has."""
        name, path = self.name, self.path
        if not path.is_file():
            inside = sorted(p.name for p in path.parent.glob(f"*{ENDING}"))
            raise GenError(
                f"model {name} has no file {path.name}; expected"
                f" {'one of ' + ', '.join(inside[:SHOWN]) if inside else 'a GGUF file'}"
            )
        with path.open("rb") as opened:
            start = opened.read(len(MAGIC))
        if start != MAGIC:
            raise GenError(
                f"model {name}: {path} is no GGUF file, it begins with {start!r}; expected"
                f" {MAGIC!r}"
            )
        library = self.library
        try:
            return read_header(library, path)
        except Exception as error:  # numpy's and gguf's own, of a file that is cut off
            reason = " ".join(str(error).split())[:200]
            raise GenError(
                f"model {name}: {path} cannot be read: {type(error).__name__}: {reason}"
            ) from None

    @cached_property
    def config(self) -> Any:
        """Config that transformers makes of the metadata.

        Raises:
            GenError: as of ``header``; or transformers does not know the architecture, or would
                leave its scaled rotations out.
        """
        kind = _value(self.header, "general.architecture")
        try:
            with self.read_once(), quiet():
                config = transformers().AutoConfig.from_pretrained(
                    self.path.parent, gguf_file=self.path.name, local_files_only=True
                )
        except Exception as error:  # the library raises bare Exceptions
            reason = " ".join(str(error).split())[:200]
            raise GenError(
                f"model {self.name}: transformers cannot read the GGUF architecture {kind!r}:"
                f" {reason}"
            ) from None
        if kind == "gpt2":  # read as n_ctx, which sizes nothing
            config.n_positions = _value(self.header, f"{kind}.context_length")
        scaling = _value(self.header, f"{kind}.rope.scaling.type")
        rotations = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if scaling not in (None, "none") and rotations.get("rope_type", "default") == "default":
            raise GenError(
                f"model {self.name}: {self.path} scales rotations ({kind}.rope.scaling.type"
                f" {scaling!r}), which transformers does not read from GGUF; expected the folder"
                " with the model's safetensors"
            )
        return config

    @cached_property
    def generation(self) -> dict[str, Any]:
        """What the file says of ends and sampling, under the names of a generation config.

        Parameters that ``generate`` lacks keep the names that they have in the file.
        """
        said: dict[str, Any] = {}
        for key in self.header.fields:
            if key.startswith(SAMPLING):
                name, value = key.removeprefix(SAMPLING), _value(self.header, key)
                exact = float(str(np.float32(value))) if isinstance(value, float) else value
                said[SAMPLING_NAMES.get(name, name)] = exact
        if said:
            said["do_sample"] = True
        ends = [_value(self.header, f"tokenizer.ggml.{end}_token_id") for end in ENDS]
        ends = list(dict.fromkeys(end for end in ends if end is not None))
        return {**said, "eos_token_id": ends} if ends else said

    @property
    def license(self) -> str | None:
        """Licence that the file states; None without one."""
        return _value(self.header, "general.license")

    def read_once(self, vocabulary: bool = False) -> AbstractContextManager[None]:
        """Let transformers read the file through its header; with ``vocabulary``, its tokens too.

        Raises:
            GenError: as of ``header``.
        """
        header = self._read() if vocabulary else self.header
        return read_once(self.library, self.path, header)

    def tokenizer(self, **options: Any) -> Any:
        """Return the tokenizer, without tokens that the file does not have.

        The classes of transformers add those that they have by default, such as GPT-2's
        ``<|endoftext|>``, and the model has no embeddings for them. ``options``: further arguments
        of ``from_pretrained``.
        """
        with self.read_once(vocabulary=not has_own_reader()), quiet():
            tokenizer = transformers().AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, **options
            )
        if self.vocabulary is None or len(tokenizer) <= self.vocabulary:
            return tokenizer
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [x for x in state["added_tokens"] if x["id"] < self.vocabulary]
        backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
        special = {
            key: token
            for key, token in tokenizer.special_tokens_map.items()
            if not isinstance(token, str) or backend.token_to_id(token) is not None
        }
        return transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
            chat_template=tokenizer.chat_template,
            **special,
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of ``from_pretrained`` by which a network gets the weights of the file, in the
        dtype asked for.

        Newer versions of transformers can keep the blocks of some architectures, with kernels that
        they download; older ones always dequantise.
        """
        make = getattr(transformers(), "GgufConfig", None)
        dequantized = {} if make is None else {"quantization_config": make(dequantize=True)}
        return {"gguf_file": self.path.name, "config": self.config, **dequantized}

    def require_all_read(self, network: nn.Module) -> None:
        """Raise ``GenError`` if the file holds numbers that the network has no parameter for."""
        tensors = self.header.tensors
        stored = sum(int(x.n_elements) for x in tensors)
        weights = {id(x): x for x in network.state_dict(keep_vars=True).values()}  # shared once
        used = sum(x.numel() for x in weights.values())
        if stored != used:
            names = [str(x.name) for x in tensors if not str(x.name).startswith("blk.")]
            raise GenError(
                f"model {self.name}: {self.path} holds {stored} numbers, and"
                f" {type(network).__name__} of transformers takes {used}; beside its blocks the"
                f" file has {', '.join(names[:SHOWN])} (rope_freqs scales rotations). Expected the"
                " folder with the model's safetensors"
            )


def _value(header: Any, key: str) -> Any:
    """Return a value of the metadata; None without it. Raises ``GenError`` for one that cannot be
    read."""
    field = header.get_field(key)
    try:
        return None if field is None else field.contents()
    except Exception as error:  # a text that is no UTF-8, kinds that gguf does not know
        reason = cut(" ".join(str(error).split()))
        raise GenError(f"{shown(key)} of the GGUF file cannot be read: {reason}") from None
