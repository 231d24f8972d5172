"""Parts of a condition in rows of input, beside the prompt: files, bytes and plain data.

A row counts by the content of its files, so a file that moves or comes as base64 is the same item,
and a file that changes is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gen.config.canonical import canonical, plain
from gen.core.condition_parts import (
    ALIASES,
    CAMERA,
    FILES,
    KINDS,
    PARTS,
    read_json,
    read_messages,
    read_token_ids,
    read_tools,
    spelled_parts,
)
from gen.core.errors import GenError, bad_value, shown
from gen.core.paths import expand_user, is_file
from gen.media.given import data_bytes, data_uri, is_data_uri, require_kind

Parts = dict[str, Any]
# parts that are lists of plain data, and what reads them
LISTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "messages": read_messages,
    "tools": read_tools,
    "tokens": read_token_ids,
}
CONDITION_KEYS = tuple(
    name for name in (*PARTS, *ALIASES) if ALIASES.get(name, name) != "text"
)  # keys of a row; the prompt has its own


def row_condition(row: Mapping[str, Any], base: Path) -> Parts:
    """Return the parts of a row beside its prompt as plain data.

    Args:
        row: keys of the row.
        base: folder that paths are relative to.

    Returns:
        Media as lists of absolute paths and ``data:`` URIs; an observation as a mapping or the path
        of a file; messages and tools as a list or the path of a file; tokens as a list.

    Raises:
        GenError: a value of another type.
    """
    if row.keys().isdisjoint(CONDITION_KEYS):
        return {}
    parts = spelled_parts({k: v for k, v in row.items() if k in CONDITION_KEYS})
    for part, value in parts.items():
        if part in KINDS:
            names = [f"{part}.{i}" if len(value) > 1 else KINDS[part] for i in range(len(value))]
            parts[part] = [_medium(v, n, base) for v, n in zip(value, names, strict=True)]
        elif isinstance(value, (str, Path)) and part != "tokens":
            parts[part] = _absolute(value, base)
        elif part == "observation":
            parts[part] = _observation(value, base)
        else:
            parts[part] = list(LISTS[part](value))
    return parts


def _absolute(path: str | Path, base: Path) -> str:
    """Return the absolute path of a file."""
    return str((base / expand_user(path)).absolute())


def _medium(value: Any, name: str, base: Path) -> str:
    """Return a medium of a row as an absolute path or a ``data:`` URI."""
    if isinstance(value, Mapping):
        content = value.get("base64", value.get("bytes"))
        if isinstance(content, str):
            content = data_bytes(f"data:;base64,{content}", name)
        value = value.get("path") if content is None else content
    if isinstance(value, (bytes, bytearray)):
        return data_uri(bytes(value))
    if not isinstance(value, (str, Path)) or not str(value):
        raise bad_value(name, value, 'a path, or bytes as {"base64": ...}')
    if is_data_uri(value):
        return data_uri(data_bytes(str(value), name))
    return _absolute(value, base)


def _observation(value: Any, base: Path) -> Parts:
    """Return an observation as plain data, camera images as media."""
    if not isinstance(value, Mapping):
        raise bad_value("observation", value, "names with values, or the path of a file")
    return {
        str(k): _medium(v, str(k), base) if _is_file_key(k, v) else plain(v)
        for k, v in value.items()
    }


def _is_file_key(key: object, value: object) -> bool:
    """Return True for a camera image or features of an observation that are a file or bytes."""
    return str(key).startswith(FILES) and isinstance(value, (str, Path, bytes, Mapping))


def content_of(condition: Parts, digest: Callable[[str], str]) -> Parts:
    """Return the parts with the sha256 of their content in the position of files and bytes.

    Args:
        condition: parts of ``row_condition``.
        digest: sha256 of a file.
    """
    found: Parts = {}
    for part, value in condition.items():
        if part in KINDS:
            found[part] = [_digest(v, digest) for v in value]
        elif not isinstance(value, str):
            found[part] = _observed(value, digest) if part == "observation" else canonical(value)
        elif Path(value).suffix.lower() != ".json" or not is_file(value):
            found[part] = digest(value)
        else:
            found[part] = _json_content(part, value, digest)
    return found


def _json_content(part: str, path: str, digest: Callable[[str], str]) -> Any:
    """Return the content of a JSON file as if it stood in the row; the file's digest if it cannot
    be read, which a check says."""
    try:
        if part in LISTS:
            return list(LISTS[part](path))
        return _observed(_observation(read_json(path, part), Path(path).parent), digest)
    except GenError:
        return digest(path)


def _observed(observation: Parts, digest: Callable[[str], str]) -> Parts:
    """Return an observation with digests of its camera images."""
    return canonical(
        {
            k: _digest(v, digest) if k.startswith(FILES) and isinstance(v, str) else v
            for k, v in observation.items()
        }
    )


def _digest(medium: str, digest: Callable[[str], str]) -> str:
    """Return the sha256 of the bytes of a medium."""
    if is_data_uri(medium):
        return hashlib.sha256(data_bytes(medium, "the medium")).hexdigest()
    return digest(medium)


def check_condition_files(condition: Parts) -> None:
    """Check that all files of a row are there and of the kind that their part expects.

    Raises:
        GenError: one is missing, or its name says that it is of another kind.
    """
    for name, path, kind in _files(condition):
        if not is_file(path):
            raise GenError(f"{name} is not a file: {shown(path)}")
        if kind is not None:
            require_kind(path, kind, name)


def _files(condition: Parts) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, path and kind of every file; the kind is None for a file of data."""
    for part, value in condition.items():
        if part in KINDS:
            named = [f"{part}.{i}" if len(value) > 1 else KINDS[part] for i in range(len(value))]
            pairs = zip(named, value, strict=True)
            yield from ((n, v, KINDS[part]) for n, v in pairs if not is_data_uri(v))
        elif isinstance(value, str):
            yield part, value, None
        elif part == "observation":
            for key, v in value.items():
                if key.startswith(FILES) and isinstance(v, str) and not is_data_uri(v):
                    yield key, v, "image" if key.startswith(CAMERA) else None
