"""Bodies that come as a form or as JSON: fields as texts, files beside them.

The official client writes lists as ``key[]`` and objects as ``key[name]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from gen.core.errors import shown
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields

F = TypeVar("F", bound=Fields)
Files = dict[str, list[bytes]]
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
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        values, found = await _form(request, files)
        # texts of a form may stand for numbers; a file stands for its field
        placed = {**values, **{name: "" for name in found if name in model.model_fields}}
        return _validated(model, placed, strict=False), found
    if kind not in ("application/json", ""):
        raise ApiError(
            f"the body is {shown(kind)}; expected application/json or multipart/form-data",
            None,
            "unsupported_media_type",
            415,
        )
    return _validated(model, parsed(await request.body()), strict=True), {}


def parsed(body: bytes | str) -> Any:
    """Return the value of some JSON. Raises ``ApiError`` for anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"the body is no JSON: {error}"
        raise ApiError(message, None, "invalid_json") from None


def _validated(model: type[F], values: Any, strict: bool) -> F:
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        problems = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(problems, body=values) from None


async def _form(request: Request, names: Collection[str]) -> tuple[dict[str, Any], Files]:
    """Return the fields and the files of a form."""
    values: dict[str, Any] = {}
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
                _put(values, name, inner, value)
    return values, files


def _put(values: dict[str, Any], name: str, inner: list[str], text: str) -> None:
    """Put the text of a field where its key says."""
    if not inner:
        is_json = text[:1] in "{[" and text[:1]
        values[name] = parsed(text) if is_json and name not in TEXTS else text
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
