"""Routes of the page at ``/``: its files, what it offers, and calls with a stream of events.

    GET  /                   the page
    GET  /static/FILE        its style and scripts
    GET  /live/modalities    modalities, prompts as examples, models
    GET  /live/models/ID     samplers that suit a model, and its defaults
    GET  /live/sampler       parameters of a sampler (?model=...&spec=...)
    POST /live/generate      a call -> events: start, canvas, step, part, result or error
    POST /live/cancel        {"id"} of a start event
    POST /live/copy          a call -> the same as Python, curl and job file
    POST /live/prefix        a file and a share of it -> the file of its beginning
    *    /world...           the playable world (``gen.serve.world.worlds``)

A reader who leaves cancels the call. Errors and bounds are those of the API.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from gen.core.errors import GenError, shown, unknown
from gen.engine.engine import Engine
from gen.serve.api.bodies import JSON, checked, require_type
from gen.serve.api.errors import STATUS_KINDS, ApiError, as_api_error
from gen.serve.live.catalogue import (
    describe_model,
    describe_parameters,
    list_modalities,
    read_spec,
)
from gen.serve.live.copies import copied
from gen.serve.live.events import Events
from gen.serve.live.media import as_file, read_file
from gen.serve.live.request import LiveRequest, read_object
from gen.serve.world.server import HEADERS as WORLD_HEADERS
from gen.serve.world.worlds import MOST_BYTES, Worlds

PAGE = Path(__file__).with_name("page")
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PLAYED = 4  # requests of worlds that are answered at a time; others wait
SILENCE = 10.0  # seconds after which a waiting reader gets a comment
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data: blob:; media-src data: blob:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def live_router(engine: Engine, deadline: float | None = None) -> APIRouter:
    """Return the routes of the page.

    Args:
        engine: engine that decodes its calls.
        deadline: seconds after which a call fails; None sets no limit.
    """
    router = APIRouter(include_in_schema=False)
    _add_page(router)
    _add_catalogue(router, engine)
    _add_calls(router, engine, deadline)
    _add_world(router, engine)
    return router


def _add_page(router: APIRouter) -> None:
    files = {path.name: path for path in sorted(PAGE.iterdir()) if path.suffix[1:] in KINDS}

    @router.get("/")
    def page() -> Response:
        return _file(files["index.html"])

    @router.get("/static/{name}")
    def page_file(name: str) -> Response:
        return _file(files[name]) if name in files else _refusal(missing(name))


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=KINDS[path.suffix[1:]], headers=HEADERS)


def missing(name: str) -> ApiError:
    """Return the error of a file that the page does not have."""
    message = f"there is no file {shown(name)}"
    return ApiError(message, "path", "not_found", 404, STATUS_KINDS[404])


def _refusal(error: GenError, param: str = "body") -> Response:
    refused = as_api_error(error, param)
    return JSONResponse(refused.body, refused.status, {**HEADERS, **refused.headers})


async def _answer(work: Callable[..., Any], *args: Any) -> Response:
    """Return the JSON of some work, done in a thread; of a refusal, one message."""
    try:
        return JSONResponse(await run_in_threadpool(work, *args), headers=HEADERS)
    except GenError as error:
        return _refusal(error)


def _add_catalogue(router: APIRouter, engine: Engine) -> None:
    @router.get("/live/modalities")
    async def modalities() -> Response:
        return await _answer(list_modalities, engine)

    @router.get("/live/models/{model:path}")
    async def model(model: str) -> Response:
        return await _answer(describe_model, engine, model)

    @router.get("/live/sampler")
    async def sampler(model: str, spec: str) -> Response:
        return await _answer(lambda: describe_parameters(engine, model, read_spec(spec)))


def _add_calls(router: APIRouter, engine: Engine, deadline: float | None) -> None:
    running: dict[str, Events] = {}

    async def read(request: Request) -> dict[str, Any]:
        require_type(request, JSON)
        content = await request.body()
        return await checked(request, len(content), lambda: read_object(content))

    async def post(request: Request, work: Callable[[dict[str, Any]], Any]) -> Response:
        try:
            asked = await read(request)
        except GenError as error:
            return _refusal(error)
        return await _answer(work, asked)

    @router.post("/live/generate")
    async def generate(request: Request) -> Response:
        try:
            asked, loop = LiveRequest.read(await read(request)), asyncio.get_running_loop()
        except GenError as error:
            return _refusal(error)
        try:
            events = await run_in_threadpool(Events.submit, engine, asked, loop, deadline)
        except GenError as error:
            return _refusal(error, "prompt")
        running[events.id] = events
        stream = _written(events, lambda: running.pop(events.id, None))
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @router.post("/live/cancel")
    async def cancel(request: Request) -> Response:
        def work(asked: dict[str, Any]) -> dict[str, bool]:
            events = running.get(str(asked.get("id")))
            if events is not None:
                events.ticket.cancel()
            return {"cancelled": events is not None}

        return await post(request, work)

    @router.post("/live/copy")
    async def copy(request: Request) -> Response:
        address = str(request.base_url).rstrip("/")
        has_key = "authorization" in request.headers

        def work(asked: dict[str, Any]) -> dict[str, str]:
            return copied(LiveRequest.read(asked), engine, address, has_key)

        return await post(request, work)

    @router.post("/live/prefix")
    async def prefix(request: Request) -> Response:
        return await post(request, lambda asked: _beginning(engine, asked))


async def _written(events: Events, end: Callable[[], Any]) -> AsyncIterator[str]:
    """Yield events as a browser reads them; a reader who leaves cancels the call."""
    try:
        async for event in events.read(SILENCE):
            if event is None:
                yield ": waiting\n\n"
                continue
            name, data = event
            yield f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
    finally:
        events.ticket.cancel()
        end()


def _beginning(engine: Engine, asked: dict[str, Any]) -> dict[str, str]:
    """Return the file of the beginning of media.

    Args:
        engine: the engine.
        asked: ``model``, ``file`` (``name`` and ``data``) and ``share``, 0 to 1.
    """
    for name in asked:
        if name not in ("model", "file", "share"):
            raise unknown("key", name, ("model", "file", "share"))
    share, file = asked.get("share"), asked.get("file")
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share < 1:
        raise GenError(f"share is {share!r}; expected a number between 0 and 1")
    # the checks of a call are those of its files
    request = LiveRequest.read({"model": asked.get("model"), "prompt": "", "prefix": file})
    modality = engine.models.pipeline(request.model).modality
    media = read_file(modality, request.files["prefix"], "file") if request.files else None
    if media is None:
        raise GenError("file is missing; expected that of a sound or a clip")
    return as_file(modality, media[: max(1, round(len(media) * share))], kept=True)


def _add_world(router: APIRouter, engine: Engine) -> None:
    made: list[Worlds] = []
    lock, turns = threading.Lock(), asyncio.Semaphore(PLAYED)

    def worlds() -> Worlds:
        with lock:  # the first visitor loads the model
            if not made:
                served = {model.modality: model.id for model in engine.models.list()}
                if "world" not in served:
                    raise ApiError("no model of worlds is served", "path", "not_found", 404)
                own = [m.id for m in engine.models.list() if m.modality == "world"]
                made.append(Worlds(engine.models.pipeline(own[-1])))
            return made[0]

    async def answer(request: Request) -> Response:
        try:
            content, path = await request.body(), request.url.path
            if len(content) > MOST_BYTES:
                message = f"the body has {len(content)} bytes; expected at most {MOST_BYTES}"
                raise ApiError(message, "body", "request_too_large", 413)
            async with turns:
                found = await run_in_threadpool(worlds)
                made = await run_in_threadpool(found.answer, request.method, path, content)
        except GenError as error:
            return _refusal(error)
        after = BackgroundTask(found.after, content) if path == "/world/step" else None
        return Response(made.body, made.status, WORLD_HEADERS, made.kind, after)

    router.add_api_route("/world", answer, methods=["GET"])
    router.add_api_route("/world/{route}", answer, methods=["POST"])
