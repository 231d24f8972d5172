"""Names of the parts of a condition as users write them, and checks of parts that are plain data.

Nothing here imports torch, so that job files can be looked at quickly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.paths import is_file

KINDS = {"images": "image", "audio": "audio", "video": "video"}  # parts that are media, their kind
NOUNS = {"image": "an image", "audio": "a sound", "video": "a video"}
PARTS = ("text", "messages", "tools", *KINDS, "observation", "tokens")
CALL_KEYS = ("tool_calls", "tool_call_id", "name")  # of a turn, beside role and content
ALIASES = {"prompt": "text", "image": "images", "audios": "audio", "videos": "video"}
CAMERA = "observation.image"  # beginning of the keys of an observation that are camera images
FEATURES = "observation.features"  # key of a file with features of the camera image
FILES = (CAMERA, FEATURES)  # beginnings of the keys of an observation whose values may be files


def spelled_parts(given: Mapping[str, Any], what: str = "part of the condition") -> dict[str, Any]:
    """Return parts by their own names, media as tuples; parts that are None are left out.

    Args:
        given: parts under their names or aliases, such as ``image`` for ``images``.
        what: kind of the names, for messages.

    Raises:
        GenError: an unknown name, or two names of one part.
    """
    names: dict[str, str] = {}
    parts: dict[str, Any] = {}
    for key, value in given.items():
        name = ALIASES.get(str(key), str(key))
        if name not in PARTS:
            raise unknown(what, key, (*PARTS, *ALIASES))
        if value is None:
            continue
        if name in parts:
            raise GenError(
                f"{names[name]} and {key} are both given, which name the same part; expected one"
                " of them"
            )
        names[name] = str(key)
        parts[name] = several(name, value) if name in KINDS else value
    return parts


def several(part: str, value: Any) -> tuple[Any, ...]:
    """Return the media of a part: the elements of a list or tuple, or the one that came.

    A tuple of a wave and its sampling rate is one sound.
    """
    is_sound = part == "audio" and isinstance(value, tuple) and len(value) == 2
    if is_sound and isinstance(value[1], (int, float)):
        return (value,)
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Return turns of a conversation, ``{"role": ..., "content": ...}`` each.

    Args:
        value: list of turns, or the path of a JSON file that holds one. The content of a turn is a
            text, or a list of ``{"type": "text", "text": ...}`` and of ``{"type": "image"}``, where
            one of the images of the condition stands. A turn that calls functions has
            ``tool_calls``, and its content may be None; one of their results has ``tool_call_id``,
            and ``name`` if need be.

    Raises:
        GenError: the file cannot be read, or a turn is none.
    """
    turns = read_json(value, "messages") if isinstance(value, (str, Path)) else value
    if not isinstance(turns, (list, tuple)) or not turns:
        raise bad_value("messages", turns, 'a list of turns {"role": ..., "content": ...}')
    return tuple(_turn(turn, f"messages.{i}") for i, turn in enumerate(turns))


def _turn(turn: Any, name: str) -> dict[str, Any]:
    """Return one turn of a conversation, its content a text or a list of parts."""
    if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
        raise bad_value(name, turn, "an object with the keys role and content")
    for key in turn:
        if key not in ("role", "content", *CALL_KEYS):
            raise unknown("key", key, ("role", "content", *CALL_KEYS), name)
    role, content = turn["role"], turn["content"]
    if not isinstance(role, str) or not role:
        raise bad_value(f"{name}.role", role, "a text such as 'user'")
    calls = [_call(c, f"{name}.tool_calls.{i}") for i, c in enumerate(turn.get("tool_calls") or ())]
    told = {key: turn[key] for key in CALL_KEYS[1:] if turn.get(key) is not None}
    for key, value in told.items():
        if not isinstance(value, str):
            raise bad_value(f"{name}.{key}", value, "a text")
    more = {**({"tool_calls": calls} if calls else {}), **told}
    if isinstance(content, (list, tuple)):
        return {"role": role, "content": [_part(p, f"{name}.content") for p in content], **more}
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise bad_value(f"{name}.content", content, "a text")
    return {"role": role, "content": content, **more}


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a call of a turn; arguments that are the text of a JSON object become the object,
    which templates take."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = 'an object such as {"function": {"name": ..., "arguments": {...}}}'
        raise bad_value(name, call, expected)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    if not isinstance(arguments, (str, Mapping)):
        raise bad_value(f"{name}.function.arguments", arguments, "an object, or its text")
    told = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        "type": "function",
        **told,
        "function": {"name": function["name"], "arguments": arguments},
    }


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the functions that an answer may call, as chat templates take them.

    Args:
        value: list of ``{"type": "function", "function": {"name": ..., "description": ...,
            "parameters": JSON schema of an object}}``, or the path of a JSON file that holds one.

    Raises:
        GenError: the file cannot be read, or an entry is no function or has the name of another.
    """
    tools = read_json(value, "tools") if isinstance(value, (str, Path)) else value
    if not isinstance(tools, (list, tuple)):
        raise bad_value("tools", tools, "a list of functions")
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            expected = 'an object such as {"type": "function", "function": {"name": ...}}'
            raise bad_value(f"tools.{i}", tool, expected)
        if function["name"] in found:
            message = f"tools.{i} has the name {shown(function['name'])} again; expected another"
            raise GenError(message)
        found[function["name"]] = {"type": "function", "function": dict(function)}
    return tuple(found.values())


def _part(part: Any, name: str) -> dict[str, str]:
    """Return one part of a turn: a text, or the position of an image."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "text" and isinstance(part.get("text", ""), str):
        return {"type": "text", "text": part.get("text", "")}
    if kind == "image" and len(part) == 1:
        return {"type": "image"}
    shown_part = part if kind in ("text", "image") else kind
    raise bad_value(
        name,
        shown_part,
        "parts of type 'text', and {'type': 'image'} where an image stands (media are parts of the"
        " condition)",
    )


def read_token_ids(value: Any) -> tuple[int, ...]:
    """Return token ids that are a condition themselves. Raises ``GenError`` for anything else."""
    expected = "a list of token ids, integers of at least 0"
    ids = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
    if not isinstance(ids, (list, tuple)) or not ids:
        raise bad_value("tokens", value, expected)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise bad_value("tokens", token, expected)
    return tuple(ids)


def read_json(path: str | Path, name: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        name: name of the part that it holds, for messages.

    Raises:
        GenError: the file is missing, or holds no JSON.
    """
    if not is_file(path):
        raise GenError(f"{name} is not a file: {shown(str(path))}")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise GenError(
            f"{name} {path} cannot be read: {error}; expected a file that holds JSON"
        ) from None
