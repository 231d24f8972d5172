"""GGUF files that somebody damaged or made to harm: no count of a header is believed before it is
held against the file, and no field ends in another error than one sentence."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from bounded import bounded
from foreign import require_held
from transformers import LlamaConfig, LlamaForCausalLM

import gen

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="make test-quantization has gguf")
import tiny_gguf  # noqa: E402  it needs gguf

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=48, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1, 7, 2**31, 2**32 - 1, 1.5, float("nan"), float("inf"), "", "x", "../..",
    "\0", [], [1], ["a"], [[]], [2**31] * 3,
)  # fmt: skip


def write(folder: Path) -> Path:
    """Write a random model as a file."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    )
    return tiny_gguf.write(model, folder / "llama.gguf")


WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
HUGE = (1, 10**6, 2**40, 2**64 - 1)


def behind(raw: bytes, kind: int, at: int) -> int:
    """Return the offset behind a value of a kind that begins at ``at``."""
    if kind == TEXT:
        return at + 8 + struct.unpack_from("<Q", raw, at)[0]
    if kind == ARRAY:
        kind, count = struct.unpack_from("<IQ", raw, at)
        at += 12
        for _ in range(count):
            at = behind(raw, kind, at)
        return at
    return at + WIDTHS[kind]


def counts_of(raw: bytes):
    """Yield the position and the width of every count, length, dimension and offset of a file."""
    tensors, fields = struct.unpack_from("<QQ", raw, 8)
    yield from ((8, 8), (16, 8))
    at = 24

    for _ in range(fields):
        at = behind(raw, TEXT, at)
        (kind,) = struct.unpack_from("<I", raw, at)
        at += 4
        if kind == ARRAY:
            yield from ((at, 4), (at + 4, 8))
        elif kind in (4, 5, TEXT):
            yield at, 8 if kind == TEXT else 4
        at = behind(raw, kind, at)
    for _ in range(min(tensors, 3)):
        at = behind(raw, TEXT, at)
        (axes,) = struct.unpack_from("<I", raw, at)
        yield at, 4
        yield from ((at + 4 + 8 * axis, 8) for axis in range(axes))
        at += 4 + 8 * axes
        yield from ((at, 4), (at + 4, 8))
        at += 12


def texts(path):
    return gen.load("text", model=str(path), max_new_tokens=4)(["abc"], seed=0).media


def test_no_count_of_a_file_is_believed_before_it_is_held_against_the_file(tmp_path):
    file = write(tmp_path)
    raw = file.read_bytes()

    texts(file)  # what loading imports is imported once, before processes are forked
    bad, ends = tmp_path / "bad.gguf", Counter()
    for at, width in counts_of(raw):
        for value in HUGE:
            damaged = bytearray(raw)
            damaged[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
            bad.write_bytes(damaged)
            ended = bounded(lambda: texts(bad), memory=512 << 20)
            assert ended.how in ("returned", "refused"), (at, value, ended)
            assert "MemoryError" not in ended.said and "\n" not in ended.said, (at, value, ended)
            ends[ended.how] += 1
    assert ends["refused"] > 100 and ends["returned"] > 10


def test_control_the_package_believes_them(tmp_path):
    raw = bytearray(write(tmp_path).read_bytes())
    arrays = [at for at, width in counts_of(bytes(raw)) if width == 8 and at > 24]
    bad, ends = tmp_path / "bad.gguf", set()
    for at in arrays[:12]:
        damaged = bytearray(raw)
        damaged[at : at + 8] = (2**40).to_bytes(8, "little")
        bad.write_bytes(damaged)
        ends.add(bounded(lambda: gguf.GGUFReader(bad), seconds=4, memory=512 << 20).how)
    assert ends & {"hung", "memory"}


def typed(value) -> bytes:
    """Return a value as a field of a file has it: its kind, and its bytes."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        raw = value.encode()
        return struct.pack("<IQ", TEXT, len(raw)) + raw
    if not value:
        return struct.pack("<IIQ", ARRAY, 4, 0)
    parts = [typed(one) for one in value]
    kind = struct.unpack_from("<I", parts[0])[0]
    return struct.pack("<IIQ", ARRAY, kind, len(parts)) + b"".join(part[4:] for part in parts)


def fields_of(raw: bytes):
    """Yield the key of every field, and where it begins, its value begins, and it ends."""
    count, at = struct.unpack_from("<Q", raw, 16)[0], 24

    for _ in range(count):
        begin, value = at, behind(raw, TEXT, at)
        at = behind(raw, struct.unpack_from("<I", raw, value)[0], value + 4)
        yield raw[begin + 8 : value].decode(), begin, value, at


def with_field(raw: bytes, begin: int, value: int, end: int, new) -> bytes:
    """Return a file with another value of a field; None leaves the field out."""
    tensors, count = struct.unpack_from("<QQ", raw, 8)
    said = b"" if new is None else raw[begin:value] + typed(new)
    *_, (_, _, _, last) = fields_of(raw)
    infos = raw[last:]
    head = raw[:8] + struct.pack("<QQ", tensors, count - (new is None)) + raw[24:begin] + said
    head += raw[end:last]
    # tensors begin at a multiple of 32 behind their names
    names = len(infos) - data_size(raw, last)
    at = len(head) + names
    old = last + names
    return head + infos[:names] + b"\0" * (-at % 32) + raw[old + (-old % 32) :]


def data_size(raw: bytes, at: int) -> int:
    """Return the bytes behind the names of tensors, which begin at ``at``."""
    for _ in range(struct.unpack_from("<Q", raw, 8)[0]):
        at += 8 + struct.unpack_from("<Q", raw, at)[0]
        at += 4 + 8 * struct.unpack_from("<I", raw, at)[0] + 12
    return len(raw) - at


def test_no_value_of_a_field_is_an_internal_error(tmp_path):
    file, rng = write(tmp_path), random.Random(1)
    raw, bad, ends = file.read_bytes(), tmp_path / "bad.gguf", Counter()
    texts(file)
    for key, *place in fields_of(raw):
        for value in rng.sample(VALUES, 6):
            bad.write_bytes(with_field(raw, *place, value))
            ended = bounded(lambda: texts(bad))
            require_held((key, value), ended, tmp_path)
            ends[ended.how] += 1
    assert ends["refused"] > 50 and ends["returned"] > 5


def test_control_a_file_with_its_own_values_is_read_as_ever(tmp_path):
    file = write(tmp_path)
    raw, same = file.read_bytes(), tmp_path / "same.gguf"
    key, *place = next(f for f in fields_of(raw) if f[0].endswith("context_length"))
    same.write_bytes(with_field(raw, *place, 48))
    assert texts(same) == texts(file)
    same.write_bytes(with_field(raw, *place, None))
    assert bounded(lambda: texts(same)).how in ("returned", "refused"), key
