"""Mutations of foreign files that know how files are built: trees of JSON and YAML, lines, headers
with lengths, chunks with checksums, archives. Not a test.

An input is an overlay of a folder of good files: bytes by name, None for a file that is gone.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import yaml

Files = dict[str, bytes | None]
GONE = b"gone"  # comment of an entry for a file that is not there
MOST = 1 << 20  # bytes of one file
TAG = "!!python/object/apply:os.system ['touch CANARY']"  # the path of the canary, see ``fuzzing``
TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ 'a' * 2000000000 }}", "{% for m in messages %}{{ m }}{% endfor %}", "{{ messages[0] }}",
    "{% set messages = 1 %}", "{{ tools|tojson }}", "{{ raise_exception('x') }}", "{{ 1 / 0 }}",
)  # fmt: skip
PATTERNS = ("(a+)+$", "(.*)*x", "(", "\\", "(.)\\1", "x{99999}", "[", ".", "", "(?<=a+)b", "a|")
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 255, 256, 65535, 10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
    2**64, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS = (
    "", "x", " ", "\0", "a\nb", "\ud800", "\u0663", "\u202e", "é" * 300, "a" * 70_000, "../..",
    "/dev/zero", "/etc/passwd", "CANARY", TAG,
    "None", "null", "true", "1e400", "-1", "NaN", "__class__", "${oc.env:HOME}", "*a", "&a", "<<",
    *TEMPLATES, *PATTERNS,
)  # fmt: skip
SHAPES = (None, True, False, [], {}, [[]], [{}], [None], {"": 0}, {"a": 1}, [1, "x"], {"a": {}})
WORDS = (
    b"[", b"]", b"{", b"}", b'"', b"'", b",", b":", b"- ", b"\n", b"\r", b"\t", b"\0", b"\xff",
    b"\xef\xbb\xbf", b"#", b"&a ", b"*a", b"!!binary ", b"---\n", b"%YAML 9\n", b"\xed\xa0\x80",
    b"nan", b"1e999", b"%s", b"$", b"{{", b"}}", b"{%", b"%}",
)  # fmt: skip
DIGITS, SCALAR = re.compile(rb"-?\d+"), re.compile(rb"(?<=[:-] )[^\n\[{]+")  # of YAML
PNG = b"\x89PNG\r\n\x1a\n"


def pack(files: Files) -> bytes:
    """Return an input as an archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.comment = zipfile.ZIP_DEFLATED, GONE if data is None else b""
            archive.writestr(entry, data or b"")
    return out.getvalue()


def unpack(data: bytes) -> Files:
    """Return the input that an archive holds; an empty one for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {
                e.filename: None if e.comment == GONE else archive.read(e)
                for e in archive.infolist()
            }
    except Exception:  # a damaged archive may raise anything
        return {}


def mutate(base: Files, given: Files, dice: random.Random) -> Files:
    """Return another input.

    Args:
        base: the good files.
        given: an input.
        dice: what decides.
    """
    found = dict(given)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        there = {k: v for k, v in {**base, **found}.items() if v is not None}
        if not there:
            return found
        name = dice.choice(sorted(there))
        if dice.random() < 0.02:
            found[name] = None
        elif dice.random() < 0.02:
            found[name] = there[dice.choice(sorted(there))]
        else:
            found[name] = mutated(there[name], dice)[:MOST]
    return found


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return another file."""
    how = dice.random()
    if how < 0.4:
        return (_text if how < 0.2 and _is_text(data) else _bytes)(data, dice)
    for form in (_archive, _chunks, _headed, _tree, _lines):
        changed = form(data, dice)
        if changed is not None:
            return changed
    return (_text if _is_text(data) else _bytes)(data, dice)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _bytes(data: bytes, dice: random.Random) -> bytes:
    """Flip, cut, repeat or overwrite bytes, mostly near the beginning."""
    raw = bytearray(data)
    if not raw:
        return dice.randbytes(dice.choice((1, 8, 100)))
    at = dice.randrange(min(len(raw), dice.choice((16, 64, 512, 1 << 30))))
    end = min(len(raw), at + dice.choice((1, 2, 4, 8, 64, 4096)))
    how = dice.randrange(7)
    if how == 0:
        raw[at] ^= 1 << dice.randrange(8)
    elif how == 1:
        del raw[at:]
    elif how == 2:
        del raw[at:end]
    elif how == 3:
        raw[at:at] = raw[at:end] * dice.choice((1, 2, 50))
    elif how == 4:
        raw[at:end] = dice.randbytes(end - at)
    else:  # an integer
        width, order = dice.choice((1, 2, 4, 8)), dice.choice(("little", "big"))
        old = int.from_bytes(raw[at : at + width], order)
        new = dice.choice((old + 1, old - 1, old * 2, *(n for n in NUMBERS if isinstance(n, int))))
        raw[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, order)
    return bytes(raw)


def _text(data: bytes, dice: random.Random) -> bytes:
    """Put a word in, replace a number or a value of YAML, or repeat or drop a part."""
    numbers = list(DIGITS.finditer(data))
    if numbers and dice.random() < 0.4:
        number = dice.choice(numbers)
        new = dice.choice((*map(_spelled, NUMBERS), b"", b"x", b"1.5.2", "٣".encode(), b"9" * 5000))
        return data[: number.start()] + new + data[number.end() :]
    scalars = list(SCALAR.finditer(data))
    if scalars and dice.random() < 0.3:
        value = dice.choice(scalars)
        new = dice.choice(TEXTS).encode(errors="surrogatepass")
        return data[: value.start()] + new + data[value.end() :]
    at = dice.randrange(len(data) + 1)
    end = min(len(data), at + dice.choice((1, 5, 30, 200)))
    part = data[at:end]
    new = dice.choice(
        (b"", part * 2, part * 2000, dice.choice(WORDS), dice.choice(WORDS) * 3000,
         dice.choice(WORDS) + part, dice.choice(TEXTS).encode(errors="surrogatepass"))
    )  # fmt: skip
    return data[:at] + new[:MOST] + data[end:]


def _spelled(number: float) -> bytes:
    return str(number).encode()


def _tree(data: bytes, dice: random.Random) -> bytes | None:
    """Change a value, a key or an entry of a file of JSON or YAML."""
    if len(data) > 200_000 or not _is_text(data):
        return None
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        try:
            tree = yaml.load(data, Loader=yaml.CSafeLoader)
        except (yaml.YAMLError, ValueError, RecursionError):
            return None
    if not isinstance(tree, (dict, list)):
        return None
    try:
        return json.dumps(_changed(tree, dice), default=str).encode(errors="surrogatepass")
    except (ValueError, RecursionError, TypeError):  # a number of thousands of digits
        return None


def _changed(tree: Any, dice: random.Random) -> Any:
    """Return a tree with one difference."""
    tree = at = copy.deepcopy(tree)
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = dice.choice(keys)
        if not isinstance(at[key], (dict, list)) or not at[key] or dice.random() < 0.3:
            break
        at = at[key]
    is_tree = bool(keys) and isinstance(at[key], (dict, list))
    if not keys:
        at.update({"x": 1}) if isinstance(at, dict) else at.append(1)
    elif (how := dice.random()) < 0.1:
        del at[key]
    elif how < 0.2 and isinstance(at, dict):
        at[dice.choice((*keys, *TEXTS, f"{key} "))] = at.pop(key)
    elif how < 0.25 and isinstance(at, list):
        at[key:key] = [at[key]] * (3000 if dice.random() < 0.3 and not is_tree else 1)
    else:
        at[key] = _value(at[key], tree, dice)
    return tree


def _value(old: Any, tree: Any, dice: random.Random) -> Any:
    """Return another value in the place of one."""
    how = dice.random()
    if how < 0.4 and isinstance(old, (int, float)):
        near = (old + 1, old - 1, old * 2, -old, not old, [old], {"a": old})
        return dice.choice((*near, *NUMBERS))
    if how < 0.4 and isinstance(old, str):
        return dice.choice((old + "x", old[:-1], old[:300] * 2000, old.upper(), [old], *TEXTS))
    if how < 0.5:  # one from elsewhere
        for _ in range(dice.randrange(6)):
            if isinstance(tree, (dict, list)) and tree:
                tree = dice.choice(list(tree.values() if isinstance(tree, dict) else tree))
        return copy.deepcopy(tree)
    if how < 0.55:
        for _ in range(dice.choice((1, 30, 400))):
            old = [old] if dice.random() < 0.5 else {"a": old}
        return old
    return dice.choice(dice.choice((NUMBERS, TEXTS, SHAPES)))


def _lines(data: bytes, dice: random.Random) -> bytes | None:
    """Change a line that is JSON, or drop or repeat one."""
    lines = data.splitlines(keepends=True)
    if not _is_text(data) or len(lines) < 2 or dice.random() < 0.3:
        return None
    at = dice.randrange(len(lines))
    changed = _tree(lines[at], dice) if lines[at].lstrip()[:1] in (b"{", b"[") else None
    if changed is not None:
        lines[at] = changed + b"\n"
    elif (how := dice.randrange(4)) == 0:
        del lines[at]
    elif how == 1:
        lines[at:at] = [lines[at]] * dice.choice((1, min(3000, MOST // len(lines[at]))))
    elif how == 2:
        lines[at] = lines[dice.randrange(len(lines))]
    else:
        lines[at] = _text(lines[at], dice)
    return b"".join(lines)


def _archive(data: bytes, dice: random.Random) -> bytes | None:
    """Change a file in an archive, whose checksums stay right."""
    if data[:4] != b"PK\3\4" or not (inside := unpack(data)):
        return None
    out = io.BytesIO()
    name = dice.choice(sorted(inside))
    inside[name] = mutated(inside[name] or b"", dice)[:MOST]
    with zipfile.ZipFile(out, "w") as archive:
        for key, value in inside.items():
            archive.writestr(zipfile.ZipInfo(key), value or b"")
    return out.getvalue()


def _chunks(data: bytes, dice: random.Random) -> bytes | None:
    """Change a chunk of a PNG, whose checksum stays right."""
    if not data.startswith(PNG):
        return None
    chunks, at = [], len(PNG)
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    if not chunks:
        return None
    which = dice.randrange(len(chunks))
    name, body = chunks[which]
    if name == b"IDAT" and dice.random() < 0.7:
        unpacked = zlib.decompressobj()
        try:
            body = zlib.compress(_bytes(unpacked.decompress(body, MOST), dice))
        except zlib.error:
            body = _bytes(body, dice)
    else:
        body = _bytes(body, dice)
    chunks[which] = dice.choice((name, name, name, b"tRNS", b"gAMA", b"acTL", b"eXIf")), body
    if dice.random() < 0.2:
        chunks.insert(dice.randrange(len(chunks)), dice.choice(chunks))
    parts = (struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b))
             for n, b in chunks)  # fmt: skip
    return PNG + b"".join(parts)


def _headed(data: bytes, dice: random.Random) -> bytes | None:
    """Change the header of a file of safetensors, or that of an array, whose length stays right."""
    form: Callable[[int], bytes]
    if data[:6] == b"\x93NUMPY" and len(data) > 12:
        begin, form = 10, lambda size: data[:8] + struct.pack("<H", size % 2**16)
        (size,) = struct.unpack_from("<H", data, 8)
    elif data[8:9] == b"{":
        begin, form = 8, lambda size: struct.pack("<Q", size)
        (size,) = struct.unpack_from("<Q", data)
    else:
        return None
    head = data[begin : begin + size]
    changed = (_tree(head, dice) if begin == 8 else None) or _text(head, dice)
    return form(len(changed)) + changed + data[begin + size :]
