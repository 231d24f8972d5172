"""Errors as OpenAI's API shows them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from gen.constraints.budget import BudgetExceeded
from gen.core.errors import GenError, shown
from gen.core.memory import is_out_of_memory
from gen.engine.ticket import Cancelled, DeadlineExceeded, Ending, QueueFull

LOG = logging.getLogger("gen.serve")
INVALID, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
RESTART_SECONDS = 5  # after which a client may try a server again that ended
CLOSED = 499  # status of a request whose client left; nobody reads it
# messages of gen, and the parameter that they are about
ABOUT = (
    (r"^(sampler\.\w+)", r"\1"),
    (r"^sampling\.(\w+)", r"\1"),
    (r"^unknown (?:sampling key|keyword) '(\w+)'", r"\1"),
    (r"^unknown parameter of sampler '[^']*': '(\w+)'", r"sampler.\1"),
    (r"^(?:unknown )?sampler\b|\bno sampler\b|for sampler\b", "sampler"),
    (r"^(seed|frames|num_samples|prefix|span|mask|source|structured|model) is\b", r"\1"),
    (r"^the mask\b", "mask"),
    (r"^(?:the )?(?:structured|regex|json_schema|schema|grammar|constraint)\b", "structured"),
    (r"^the shortest text of the constraint\b", "structured"),
    (r"^parameters of function\b", "tools"),
    (r"^unknown (model) ", r"\1"),
    (r"^(?:the )?(prompt) (?:is|'|\")", r"\1"),
    (r"^unknown (?:key|sampling parameter) '(\w+)'", r"\1"),
    (r"^([a-z]\w*(?:\.\w+)*) is (?:missing\b|.*; expected )", r"\1"),
    (r"^(?:structured|regex)\b|^the (?:\w+ ){0,4}(?:constraint|grammar)\b", "structured"),
)
TYPES = ("str", "int", "float", "bool")  # in the locations of pydantic's errors
STATUS_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(GenError):
    """Refusal of a request.

    Attributes:
        status: HTTP status.
        param: parameter that the message is about.
        code: short name of the reason.
        kind: ``type`` of the error.
        headers: further headers of the response.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Error object of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error of a request whose fields have other names.

        Args:
            names: names of the request's fields by those that messages have.
        """
        own = self.param or ""
        name = names.get(own.partition(".")[0])
        if name is None:
            return self
        message = str(self)
        if message.startswith(own):
            message = name + message[len(own) :]
        return ApiError(message, name, self.code, self.status, self.kind, self.headers)

    def response(self) -> JSONResponse:
        """Return the response."""
        return JSONResponse(self.body, self.status, self.headers)


def too_many(message: str, seconds: float, code: str) -> ApiError:
    """Return the error of a request that may come again after some seconds."""
    after = {"Retry-After": str(max(1, round(seconds)))}
    return ApiError(message, None, code, 429, RATE, after)


def server_ends() -> ApiError:
    """Return the error of a request that is not done when the server ends."""
    message = "the server ends before the request is done; expected another try"
    after = {"Retry-After": str(RESTART_SECONDS)}
    return ApiError(message, None, "server_shutting_down", 503, SERVER, after)


def event_of(error: ApiError, is_page: bool = False) -> bytes:
    """Return an error as the last event of a stream; those of the page have names."""
    name = "event: error\n" if is_page else ""
    body = error.body["error"] if is_page else error.body
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Return any error of a request as a refusal.

    Args:
        error: what was raised.
        param: parameter that messages of no other one are about.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return too_many(str(error), error.retry_after, "queue_full")
    if isinstance(error, DeadlineExceeded):
        # another try would take as long
        headers = {"x-should-retry": "false"}
        return ApiError(str(error), "deadline", "deadline_exceeded", 504, "timeout_error", headers)
    if isinstance(error, Ending):
        return server_ends()
    if isinstance(error, Cancelled):
        return ApiError(str(error), None, "cancelled", CLOSED)
    if isinstance(error, GenError):
        message = str(error)
        found = next((m.expand(to) for p, to in ABOUT if (m := re.search(p, message))), param)
        code = "constraint_too_large" if isinstance(error, BudgetExceeded) else "invalid_value"
        return ApiError(message.removeprefix("sampling."), found, code)
    if is_out_of_memory(error):
        return ApiError("the server ran out of memory", None, "out_of_memory", 503, SERVER)
    LOG.error("a request failed: %s", type(error).__name__, exc_info=error)
    return ApiError("the server failed", None, "internal_error", 500, SERVER)


def of_validation(errors: RequestValidationError) -> ApiError:
    """Return the first error of a body, query or path that does not fit its schema."""
    error = errors.errors()[0]
    inner = error.get("ctx", {}).get("error")
    param = _param_of(error)
    if isinstance(inner, ApiError):
        if param and inner.param:  # of an object inside of the body
            inner.param = f"{param}.{inner.param}"
        return inner
    if error["type"] == "json_invalid":
        return ApiError(f"the body is no JSON: {error['ctx']['error']}", "body", "invalid_json")
    if error["type"] == "missing":
        name = param or "body"
        return ApiError(f"{param or 'the body'} is missing", name, "missing_parameter")
    about = [e["msg"] for e in errors.errors() if _param_of(e) == param]  # one for each type
    texts = [re.sub(r"^(Input|Value|String|List) should (be|have) ?", "", text) for text in about]
    expected = " or ".join(dict.fromkeys(texts))[:300]
    message = f"{param or 'the body'} is {shown(error.get('input'))}; expected {expected}"
    code = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    return ApiError(message, param or "body", code)


def _param_of(error: Mapping[str, Any]) -> str | None:
    """Return the parameter that pydantic's error is about, without the types that it tried."""
    parts = [str(part) for part in error["loc"][1:] if part not in TYPES]
    # members of unions are in the location too: classes, and types such as list[Part]
    return ".".join(p for p in parts if re.fullmatch(r"\w+", p) and not p[0].isupper()) or None


def of_http(error: HTTPException, method: str, path: str) -> ApiError:
    """Return the error of a path or method that does not exist, or of a broken form."""
    message, param, code = str(error.detail), "body", "invalid_body"
    if error.status_code == 404:
        message = f"there is no {shown(path)[1:-1]}; expected a path of /openapi.json"
        param, code = "path", "not_found"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{shown(path)[1:-1]} has no {shown(method)[1:-1]}; expected {allowed}"
        param, code = "method", "method_not_allowed"
    kind = STATUS_KINDS.get(error.status_code, INVALID if error.status_code < 500 else SERVER)
    return ApiError(message, param, code, error.status_code, kind, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of an application one of OpenAI's error objects."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError):
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException):
        return of_http(error, request.method, request.url.path).response()

    @app.exception_handler(GenError)
    async def refused(request: Request, error: GenError):
        return as_api_error(error).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception):
        return as_api_error(error).response()
