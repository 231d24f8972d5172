"""Reading GGUF files through transformers without its repetitions.

To load one file transformers parses its header several times, with a reader that takes seconds for
a vocabulary, builds the map of tensor names once per module, and dequantises a few rows at a time.
Inside ``read_once`` it does the same with one parsed header, one map and long rows: configs,
tokenizers and weights are those that it makes without, bit for bit.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gen.models.load.libraries import LOADING

TOKENS = "tokenizer.ggml.tokens"  # field of the vocabulary
ROW = 2**16  # bytes of a row that blocks are dequantised in
SHORT = 256  # entries of an array of the metadata that configs may need


def read_header(library: ModuleType, path: Path) -> Any:
    """Return the header of a file, a ``GGUFReader`` of the package gguf.

    Args:
        library: the package.
        path: the file.
    """
    return _reader(library)(path)


def without_vocabulary(header: Any) -> Any:
    """Return a header without the long arrays of the tokenizer, which only the tokenizer needs.

    The list of tokens stays where nothing else says how many there are.
    """
    kind = header.get_field("general.architecture")
    kept = () if kind and header.get_field(f"{kind.contents()}.vocab_size") else (TOKENS,)
    short = object.__new__(type(header))
    short.__dict__.update(vars(header))
    short.fields = {
        key: field
        for key, field in header.fields.items()
        if key in kept or not key.startswith("tokenizer.") or len(field.data) <= SHORT
    }
    return short


def _reader(library: ModuleType) -> type:
    """Return a ``GGUFReader`` that is fast for long arrays; its results are the same.

    A slice of a ``numpy.memmap`` is a new memmap, which takes most of the time of its parent.
    """
    kinds, array = library.GGUFValueType, library.GGUFValueType.ARRAY

    class Reader(library.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, start: int, raw: int) -> tuple[int, list, list, list]:
            if raw != array:
                return super()._get_field_parts(start, raw)
            at, data = start + 12, self._data
            if int(self._get(start + 4, np.uint64)[0]) > len(data) - at:
                raise ValueError(f"an array at byte {start} has more entries than the file bytes")
            if self.byte_order != "I":
                return super()._get_field_parts(start, raw)
            kind, count = struct.unpack_from("<IQ", data, start)
            parts = [self._get(start, np.uint32), self._get(start + 4, np.uint64)]
            if kind == kinds.STRING and count:
                length_at = struct.Struct("<Q").unpack_from
                for _ in range(count):
                    (length,) = length_at(data, at)
                    begin, end = at + 8, at + 8 + length
                    if end > len(data):
                        raise ValueError(f"a text ends at byte {end} of {len(data)}")
                    parts += (data[at:begin].view(np.uint64), data[begin:end])
                    at = end
                return at - start, parts, list(range(3, 2 * count + 2, 2)), [array, kinds(kind)]
            scalar = self.gguf_scalar_to_np.get(kinds(kind))
            if scalar is None or not count:
                return super()._get_field_parts(start, raw)
            values = self._get(at, scalar, count)
            if len(values) < count:
                raise ValueError(f"an array at byte {start} ends behind the file")
            parts += [values[i : i + 1] for i in range(count)]
            return 12 + values.nbytes, parts, list(range(2, 2 + count)), [array, kinds(kind)]

    return Reader


@contextmanager
def read_once(library: ModuleType, path: Path, header: Any) -> Iterator[None]:
    """Let transformers read a file through a header that was parsed before.

    Args:
        library: the package gguf.
        path: the file; others are read as ever.
        header: its header, or ``without_vocabulary`` of it.
    """
    reader = library.GGUFReader

    def opened(other: Any, *args: Any, **options: Any) -> Any:
        same = os.path.samefile(other, path)
        return header if same else reader(other, *args, **options)

    legacy = import_module("transformers.modeling_gguf_pytorch_utils")
    patches = [
        (library, "GGUFReader", opened),
        (library, "get_tensor_name_map", functools.cache(library.get_tensor_name_map)),
        (library, "dequantize", in_long_rows(library.dequantize)),
        (legacy, "tqdm", lambda tensors, **_: tensors),  # a progress bar without a switch
    ]
    if has_own_reader():
        own = import_module("transformers.integrations.gguf.reader")
        patches.append((own, "_mapped", in_plain_slices(own._mapped)))
    with LOADING, ExitStack() as stack:
        for module, key, value in patches:
            stack.callback(setattr, module, key, getattr(module, key))
            setattr(module, key, value)
        yield


def has_own_reader() -> bool:
    """Return True for a transformers that reads vocabularies without the package gguf."""
    return find_spec("transformers.integrations.gguf") is not None


def in_plain_slices(mapped: Callable[[str], np.ndarray]) -> Callable:
    """Return a function that maps a file as a plain array: slices of a memmap are slow ones."""
    return lambda path: mapped(path).view(np.ndarray)


def in_long_rows(dequantize: Callable[[np.ndarray, Any], np.ndarray]) -> Callable:
    """Return a ``gguf.dequantize`` that takes many rows as one: its blocks do not cross rows."""

    def long(data: np.ndarray, kind: Any) -> np.ndarray:
        if data.dtype != np.uint8 or data.ndim < 2:  # numbers, which need no work
            return dequantize(data, kind)
        rows = math.prod(data.shape[:-1])
        together = math.gcd(rows, max(1, ROW // data.shape[-1]))
        return dequantize(data.reshape(rows // together, -1), kind).reshape(*data.shape[:-1], -1)

    return long
