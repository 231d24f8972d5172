"""Bodies that come as a form or as JSON: fields as texts, files beside them.

The official client writes lists as ``key[]`` and objects as ``key[name]``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from typing import Any, TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import Request

from gen.core.errors import shown
from gen.serve.api.bodies import JSON, checked, parsed, require_type, validated
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields

F = TypeVar("F", bound=Fields)
Files = dict[str, list[bytes]]
Texts = list[tuple[str, list[str], str]]  # name of a field, names in it, its text
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
MOST_FIELDS, MOST_FILES = 200, 16
KEY = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")


async def body_of(request: Request, model: type[F], files: Collection[str] = ()) -> tuple[F, Files]:
    """Return the body of a request and the files in it.

    Args:
        request: the request, a form (multipart or URL-encoded) or JSON.
        model: fields of the body.
        files: fields that a form may hold as files.

    Raises:
        ApiError: the body cannot be read.
        RequestValidationError: a field does not fit.
    """
    if require_type(request, JSON, *FORMS) == JSON:
        content = await request.body()
        read_json = lambda: validated(model, parsed(content))  # noqa: E731
        return await checked(request, len(content), read_json), {}
    await request.body()  # whole, since the files of a form take handles while it is read
    turns: asyncio.Semaphore = request.app.state.large_bodies
    async with turns:
        texts, found = await _form(request, files)

    def read() -> F:
        values: dict[str, Any] = {}
        for name, inner, text in texts:
            _put(values, name, inner, text)
        # texts of a form may stand for numbers; a file stands for its field
        placed = {**values, **{name: "" for name in found if name in model.model_fields}}
        return validated(model, placed, strict=False)

    return await checked(request, sum(len(text) for _, _, text in texts), read), found


async def _form(request: Request, names: Collection[str]) -> tuple[Texts, Files]:
    """Return the fields and the files of a form."""
    texts: Texts = []
    files: Files = {}
    async with request.form(max_files=MOST_FILES, max_fields=MOST_FIELDS) as form:
        for key, value in form.multi_items():
            match = KEY.fullmatch(key)
            if match is None:
                raise ApiError(f"unknown parameter {shown(key)}", key[:100], "unknown_parameter")
            name, inner = match[1], re.findall(r"\[([^\[\]]*)\]", match[2])
            if isinstance(value, UploadFile):
                if name not in names:
                    message = f"{shown(name)} is a file; expected files as {', '.join(names)}"
                    raise ApiError(message, name[:100], "invalid_type")
                files.setdefault(name, []).append(await value.read())
            else:
                texts.append((name, inner, value))
    return texts, files


def _put(values: dict[str, Any], name: str, inner: list[str], text: str) -> None:
    """Put the text of a field where its key says."""
    if not inner:
        is_json = text[:1] in "{[" and text[:1]
        values[name] = parsed(text.encode()) if is_json and name not in TEXTS else text
        return
    if inner == [""]:
        several = values.setdefault(name, [])
        if isinstance(several, list):
            several.append(text)
        return
    node = values.setdefault(name, {})
    for key in inner[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ApiError(f"{name} is given twice, in two ways", name, "invalid_value")
    node[inner[-1]] = _scalar(text)


TEXTS = ("prompt",)  # fields that are no JSON whatever they begin with


def _scalar(text: str) -> Any:
    """Return the number, truth value or null that a text stands for, or the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float, bool, type(None))) else text


def form_schema(model: type[Fields], files: Collection[str]) -> dict[str, Any]:
    """Return what OpenAPI says of a body that is a form or JSON.

    Args:
        model: fields of the body.
        files: fields that are files in a form.
    """
    as_json = model.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = dict(as_json["properties"])
    for name in files:
        properties[name] = {"type": "string", "format": "binary"}
    form = {**as_json, "properties": properties}
    content = {"application/json": {"schema": as_json}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
