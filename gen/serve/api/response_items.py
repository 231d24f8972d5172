"""Items of ``/v1/responses``: what a conversation came from, as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gen.core.errors import shown
from gen.serve.api.chat import READ, InputAudio
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Name, Text

MOST_ITEMS, MOST_PARTS = 1_000, 1_000
TEXTS = ("input_text", "output_text")
REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class ItemPart(Fields):
    """Part of an item: a text, an image, a sound or a clip."""

    type: Literal[
        "input_text", "output_text", "refusal", "input_image", "input_audio", "input_file"
    ]
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = Field(None, description="A data: URI.", max_length=None)
    detail: Name | None = None
    input_audio: InputAudio | None = None
    file_data: str | None = Field(None, description="Base64 or a data: URI.")
    filename: Name | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, description=READ)
    parsed: Any = Field(None, description=READ)


ItemParts = Annotated[list[ItemPart], Field(max_length=MOST_PARTS, fail_fast=True)]


class Item(Fields):
    """Item of a conversation. Items of answers may be sent as they came."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: Name | None = Field(None, description=READ)
    status: Name | None = Field(None, description=READ)
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | ItemParts | None = None
    phase: Name | None = Field(None, description=READ)
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    parsed_arguments: Any = Field(None, description=READ)
    output: Text | ItemParts | None = None


Items = Annotated[list[Item], Field(max_length=MOST_ITEMS, fail_fast=True)]
TextOrItems = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[Items, Tag("a list")],
    Discriminator(lambda given: "a list" if isinstance(given, list) else "a text"),
]


def plain_items(given: str | list[Item], param: str = "input") -> list[dict[str, Any]]:
    """Return items as plain data, a text as that of the user.

    Raises:
        ApiError: an item lacks a field of its type.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for i, item in enumerate(given):
        for field in REQUIRED[item.type]:
            if getattr(item, field) is None:
                where = f"{param}.{i}.{field}"
                message = f"{where} is missing; expected it of a {item.type}"
                raise ApiError(message, where, "missing_parameter")
    return [item.model_dump(exclude_none=True) for item in given]


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a conversation, values of ``ChatRequest.messages``. Calls that follow
    each other, and the text before them, are one message.

    Raises:
        ApiError: a call has no result, or a part lacks its content.
    """
    found: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant"})
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif item["type"] == "function_call_output":
            content = _content(item["output"])
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            found.append({"role": item["role"], "content": _content(item["content"])})
    return found


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a content as a message has it. Parts of text alone are one text."""
    if isinstance(content, str):
        return content
    if all(part["type"] in TEXTS and part.get("text") is not None for part in content):
        return "".join(part["text"] for part in content)
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as a message has it. Raises ``ApiError`` for one without its content."""
    kind = part["type"]
    if kind in TEXTS:
        return {"type": "text", "text": _given(part, "text")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _given(part, "refusal")}
    if kind == "input_image":
        image = {"url": _given(part, "image_url"), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": _given(part, "input_audio")}
    file = {"file_data": _given(part, "file_data"), "filename": part.get("filename")}
    return {"type": "file", "file": file}


def _given(part: Mapping[str, Any], field: str) -> Any:
    """Return a field of a part. Raises ``ApiError`` where it is missing."""
    if part.get(field) is None:
        message = f"a part of type {shown(part['type'])} has no {field}; expected one"
        raise ApiError(message, "input", "missing_parameter")
    return part[field]
