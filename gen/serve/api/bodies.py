"""Bodies of requests: judged by their size, then parsed, then checked.

JSON is measured as bytes before it is parsed, so that a body of millions of values costs a glance.
A large body is read in a thread, one at a time: other requests do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from gen.core.errors import shown
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import DEEPEST, Fields

F = TypeVar("F", bound=Fields)
T = TypeVar("T")
JSON = "application/json"
LARGE = 32_768  # bytes, from which on a body is read in a thread
MOST_VALUES = 150_000  # values of a body
BLOCK = 1 << 20  # bytes that are measured at a time


class BodyRoute(APIRoute):
    """Route whose JSON is read as this module does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request, whose body is read first."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type) and issubclass(model, Fields), "a body is one of Fields"

        async def read(request: Request) -> Response:
            require_type(request, JSON)
            content = await request.body()
            found = await checked(request, len(content), lambda: validated(model, parsed(content)))
            return await handle(Read(request, found))

        return read


class Read(Request):
    """Request whose body is read.

    Args:
        request: the request.
        found: its body.
    """

    def __init__(self, request: Request, found: Fields):
        super().__init__(request.scope, request.receive)
        self.found = found

    async def body(self) -> bytes:
        """Return what stands for the body, which is not kept."""
        return b"{}"

    async def json(self) -> Fields:
        """Return the body."""
        return self.found


async def checked(request: Request, size: int, read: Callable[[], T]) -> T:
    """Return what ``read`` makes of a body of some bytes: in a thread if it is large, one at a
    time."""
    if size < LARGE:
        return read()
    turns: asyncio.Semaphore = request.app.state.large_bodies
    async with turns:
        return await run_in_threadpool(read)


def require_type(request: Request, *kinds: str) -> str:
    """Return the media type of a body. Raises ``ApiError`` for another one than ``kinds``."""
    given = request.headers.get("content-type", "")
    message = Message()
    message["content-type"] = given
    kind, charset = given.partition(";")[0].strip().lower(), message.get_content_charset("utf-8")
    if kind not in kinds or (kind == JSON and charset not in ("utf-8", "us-ascii")):
        came = shown(given) if given else "missing"
        text = f"Content-Type is {came}; expected {' or '.join(kinds)}"
        raise ApiError(text, "Content-Type", "unsupported_media_type", 415)
    return kind


def parsed(body: bytes) -> Any:
    """Return the value of some JSON in UTF-8, which may begin with a byte order mark.

    Raises:
        ApiError: it is anything else, or has too many values.
    """
    if not body:
        raise ApiError("the body is missing", "body", "missing_parameter")
    require_measure(body)
    try:
        return json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        message = f"the body is no JSON: {shown(str(error))[1:-1]}"
        raise ApiError(message, "body", "invalid_json") from None


def require_measure(body: bytes) -> None:
    """Refuse JSON of too many values or levels, which is not parsed for it. Raises ``ApiError``."""
    if len(body) < LARGE:
        return  # it is parsed in no time
    # without escapes every quotation mark begins or ends a text
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, depth, within = 1, 0, np.False_
    for first in range(0, len(plain), BLOCK):
        letters = np.frombuffer(plain, np.uint8, min(BLOCK, len(plain) - first), first)
        texts = np.logical_xor.accumulate(letters == ord('"')) ^ within
        within = texts[-1]
        marks = letters[~texts]
        opens = (marks == ord("[")) | (marks == ord("{"))
        closes = (marks == ord("]")) | (marks == ord("}"))
        values += int(np.count_nonzero(marks == ord(","))) + int(np.count_nonzero(opens))
        levels = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32) + depth
        if values > MOST_VALUES:
            message = f"the body has more than {MOST_VALUES} values"
            raise ApiError(message, "body", "too_many_values", 413)
        if len(levels):
            depth = int(levels[-1])
            if levels.max() > 2 * DEEPEST:
                message = f"the body nests more than {DEEPEST} lists and objects"
                raise ApiError(message, "body", "invalid_value")


def validated(model: type[F], values: Any, strict: bool = True) -> F:
    """Return fields of their values. Raises ``RequestValidationError``, or ``ApiError``."""
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        problems = [{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)]
        raise RequestValidationError(problems, body=values) from None
