"""Conditions of items that have more parts than a prompt: parsed, and kept as files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gen.contracts.condition import Condition
from gen.core.condition_parts import CAMERA, KINDS
from gen.core.files import TEMPORARY, put, sha256, writing
from gen.core.processes import worker_name
from gen.media.given import KEPT, given_bytes, is_data_uri, read_media
from gen.media.kinds import extension_of
from gen.store.ledger import INPUTS

Parts = dict[str, Any]


def given_prompt(prompt: str, parts: Parts | None) -> str | Condition:
    """Return what a pipeline plans: a prompt, or the condition of a prompt and further parts."""
    return Condition.of({"text": prompt, **parts}) if parts else prompt


def parsed_condition(
    modality: Any, prompt: str, parts: Parts | None, readable: set[str] | None = None
) -> Any:
    """Return the typed condition of a row.

    Args:
        modality: modality that parses it.
        prompt: text of the row.
        parts: parts of the condition beside the prompt.
        readable: conditions whose media were read; that of the row is added. None reads none.

    Raises:
        GenError: it does not parse, or a file cannot be read.
    """
    given = given_prompt(prompt, parts)
    if isinstance(given, str):
        return modality.condition(given)
    parsed = modality.parse(given)
    key = json.dumps(parts, sort_keys=True)
    if readable is not None and key not in readable:
        given.check_media()
        readable.add(key)
    return parsed


def kept_parts(given: Condition | None, folder: Path) -> Parts:
    """Return the parts of a condition beside its text as plain data, with media that are in memory
    in files of the job.

    Args:
        given: the condition; None has no parts.
        folder: folder of the job.

    Raises:
        GenError: a medium cannot be read or written.
    """
    if given is None:
        return {}

    def kept(value: Any, kind: str) -> str:
        if isinstance(value, Path) or (isinstance(value, str) and not is_data_uri(value)):
            return str(Path(value).expanduser().absolute())
        media, content = read_media(value, kind), given_bytes(value, kind)
        if kind == "video" and content is not None:  # frames alone would lose their times
            extension = extension_of(content) or "bin"
            return kept_file(folder, kind, extension, lambda path: path.write_bytes(content))
        return kept_file(folder, kind, KEPT[kind], media.write)

    parts = given.to_dict()
    parts.pop("text", None)
    for part, kind in KINDS.items():
        if part in parts:
            parts[part] = [kept(value, kind) for value in vars(given)[part]]
    for key, value in (given.observation or {}).items():
        if key.startswith(CAMERA):
            parts["observation"][key] = kept(value, "image")
    return parts


def kept_file(folder: Path, name: str, extension: str, write: Callable[[Path], object]) -> str:
    """Write a file of a job under a name with its digest; return its path."""
    with writing(folder):
        (folder / INPUTS).mkdir(parents=True, exist_ok=True)
    path = folder / INPUTS / f"{TEMPORARY}{worker_name()}-{name}.{extension}"
    put(path, write)
    named = path.with_name(f"{name}-{sha256(path)[:12]}{path.suffix}")
    os.replace(path, named)
    return str(named)
