"""Messages of a conversation as a condition."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gen.contracts.condition import Condition
from gen.core.errors import shown
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Name, Text, only
from gen.serve.api.media import given_bytes, given_image

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

    type: Literal["text", "image_url", "input_audio", "file"]
    text: Text | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    file: InputFile | None = None


class Message(Fields):
    """Turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]
    name: Name | None = None


def condition_of(messages: list[Message], takes_messages: bool) -> Condition:
    """Return the condition of a conversation.

    A model without a chat template takes one message of the user, whose text is the prompt.

    Args:
        messages: turns.
        takes_messages: whether the model takes conversations.

    Raises:
        ApiError: the model takes no such conversation, or a part cannot be read.
    """
    media: dict[str, list[Any]] = {"images": [], "audio": [], "video": []}
    turns = [
        {"role": m.role, "content": _content(m, f"messages.{i}", media)}
        for i, m in enumerate(messages)
    ]
    parts = {kind: tuple(values) for kind, values in media.items() if values}
    if takes_messages:
        return Condition.of({"messages": turns, **parts})
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


def _content(message: Message, name: str, media: dict[str, list[Any]]) -> Any:
    """Return the content of a turn, and put its media with those before."""
    if isinstance(message.content, str):
        return message.content
    return [_part(part, f"{name}.content.{n}", media) for n, part in enumerate(message.content)]


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
