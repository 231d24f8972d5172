"""Messages of a conversation as a condition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gen.contracts.condition import Condition
from gen.core.errors import shown
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Name, Text, only
from gen.serve.api.media import given_bytes, given_image
from gen.serve.api.tools import MOST_TOOLS

READ = "What a client has read out of an answer; not used."
MOST_PARTS = 1_000  # of a message


class ImageUrl(Fields):
    """Image of a message."""

    url: Text = Field(description="A data: URI; addresses are not fetched.", max_length=None)
    detail: Name | None = None


class InputAudio(Fields):
    """Sound of a message."""

    data: str = Field(description="Base64.")
    format: Literal["wav", "mp3", "flac"]


class InputFile(Fields):
    """Clip of a message."""

    file_data: str = Field(description="Base64 or a data: URI.")
    filename: Name | None = None


class Part(Fields):
    """Part of a message: a text, an image, a sound or a clip."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    file: InputFile | None = None


Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


class CalledFunction(Fields):
    """Function that an answer called, and its arguments as JSON text."""

    name: Name
    arguments: Text
    parsed_arguments: Any = Field(None, description=READ)


class ToolCall(Fields):
    """Call of an answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description=READ)


class Message(Fields):
    """Turn of a conversation. Answers may be sent as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Name | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: dict[str, Any] | None = Field(None, max_length=0)
    function_call: dict[str, Any] | None = Field(None, max_length=0)
    parsed: Any = Field(None, description=READ)


def condition_of(
    messages: list[Message], takes_messages: bool, tools: tuple[dict[str, Any], ...] = ()
) -> Condition:
    """Return the condition of a conversation.

    A model without a chat template takes one message of the user, whose text is the prompt.

    Args:
        messages: turns.
        takes_messages: whether the model takes conversations.
        tools: functions that the answer may call.

    Raises:
        ApiError: the model takes no such conversation, or a part cannot be read.
    """
    media: dict[str, list[Any]] = {"images": [], "audio": [], "video": []}
    turns = [_turn(m, f"messages.{i}", media) for i, m in enumerate(messages)]
    parts = {kind: tuple(values) for kind, values in media.items() if values}
    if takes_messages:
        return Condition.of({"messages": turns, "tools": tools, **parts})
    if len(messages) != 1 or messages[0].role != "user":
        roles = ", ".join(m.role for m in messages[:4])
        raise ApiError(
            f"the messages are of {roles}; the model has no chat template and takes one message of"
            " the user",
            "messages",
            "unsupported_value",
        )
    content = turns[0]["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    return Condition.of({"text": content, **parts}) if parts else Condition(text=content)


def _turn(message: Message, name: str, media: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a message as a turn of a condition, and put its media with those before. Raises
    ``ApiError`` for one that lacks what its role needs, or has what another role has."""
    calls, role, content = message.tool_calls or [], message.role, message.content
    if role != "assistant" and calls:
        message_ = f"{name} is of the {role} and has tool_calls; expected them of the assistant"
        raise ApiError(message_, f"{name}.tool_calls", "invalid_value")
    if (role == "tool") != (message.tool_call_id is not None):
        what = "has no tool_call_id" if role == "tool" else "has a tool_call_id"
        text = f"{name} is of the {role} and {what}; expected it of every result of a tool alone"
        raise ApiError(text, f"{name}.tool_call_id", "invalid_value")
    if content is None:
        if not calls and message.refusal is None:
            text = f"{name}.content is missing; expected a text, or the tool_calls of an answer"
            raise ApiError(text, f"{name}.content", "missing_parameter")
        content = message.refusal or ""
    if not isinstance(content, str):
        content = [_part(part, f"{name}.content.{n}", media) for n, part in enumerate(content)]
    turn: dict[str, Any] = {"role": role, "content": content}
    if calls:
        unread = {"index": True, "function": {"parsed_arguments"}}
        turn["tool_calls"] = [call.model_dump(exclude=unread) for call in calls]
    if role == "tool":
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _part(part: Part, name: str, media: dict[str, list[Any]]) -> dict[str, str]:
    """Return a part of a turn, and put its medium with those before. Raises ``ApiError``."""
    value = getattr(part, part.type)
    if value is None:
        raise ApiError(f"{name}.{part.type} is missing", f"{name}.{part.type}", "missing_parameter")
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if isinstance(value, ImageUrl):
        if not value.url.startswith("data:"):
            message = f"{name} is {shown(value.url)}; expected a data: URI"
            raise ApiError(message, name, "invalid_media")
        only(value.detail, ("auto", "high"), f"{name}.detail", "images are read as they are")
        media["images"].append(given_image(value.url, name))
        return {"type": "image"}
    if isinstance(value, InputAudio):
        media["audio"].append(given_bytes(value.data, name))
        return {"type": "audio"}
    media["video"].append(given_bytes(value.file_data, name))
    return {"type": "video"}
