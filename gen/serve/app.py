"""The application of ``gen serve``: OpenAI's endpoints over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.versions import gen_version
from gen.engine.engine import Engine
from gen.engine.models import ServedModel
from gen.serve.api.batches import Batches, batch_router, file_router
from gen.serve.api.calls import Calls
from gen.serve.api.embeddings import embedding_router
from gen.serve.api.errors import ApiError, add_error_handlers
from gen.serve.api.images import image_router
from gen.serve.api.motions import motion_router
from gen.serve.api.responses import response_router
from gen.serve.api.speech import speech_router
from gen.serve.api.texts import text_router
from gen.serve.api.videos import video_router
from gen.serve.guards import Guards
from gen.serve.live.routes import live_router
from gen.serve.metrics import Metrics
from gen.serve.settings import Settings

ENDPOINTS = {
    "image": ("/v1/images/generations", "/v1/images/edits"),
    "audio": ("/v1/audio/speech",),
    "video": ("/v1/videos",),
    "text": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "motion": ("/v1/motions",),
    "action": ("/v1/actions",),
}
DOCS = Path(__file__).with_name("docs.html")
DEFAULTS = Settings()
METHODS = ("get", "post", "delete")


def make_app(engine: Engine, settings: Settings = DEFAULTS) -> FastAPI:
    """Return the application.

    Args:
        engine: engine that decodes; its owner closes it.
        settings: limits, keys and folders.
    """
    metrics = Metrics(engine)
    calls = Calls(engine, settings, metrics)
    batches = None if settings.batches is None else Batches(calls, settings.batches)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await run_in_threadpool(batches.stop)

    app = FastAPI(
        title="gen",
        version=gen_version(),
        summary="Samplers for token models of every modality, behind OpenAI's API",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    add_error_handlers(app)
    app.include_router(_general(calls))
    for make in (image_router, speech_router, motion_router):
        app.include_router(make(calls))
    for make in (text_router, response_router, embedding_router):
        app.include_router(make(calls))
    if settings.kept_videos:
        app.include_router(video_router(calls))
    app.include_router(file_router(batches))
    app.include_router(batch_router(batches))
    app.include_router(live_router(engine, settings.deadline))
    app.state.large_bodies = asyncio.Semaphore(1)
    app.add_middleware(Guards, settings=settings, metrics=metrics)
    if settings.cors:  # outside of the guards: a browser asks first without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=[method.upper() for method in METHODS],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.openapi = lambda: _openapi(app)
    return app


def _general(calls: Calls) -> APIRouter:
    """Return the routes that say what is served and how it goes."""
    router = APIRouter(tags=["server"])

    @router.get("/health")
    async def health() -> dict[str, Any]:
        """Tell that the server answers, and how many items wait and run."""
        stats = calls.engine.stats
        return {
            "status": "ok",
            "version": gen_version(),
            "waiting": stats.waiting.total(),
            "running": stats.running.total(),
        }

    @router.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Return the figures of the server in the text format of Prometheus."""
        return Response(calls.metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models."""
        return {"object": "list", "data": [_model(m) for m in calls.engine.models.list()]}

    @router.get("/v1/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        """Return one model."""
        try:
            return _model(calls.engine.models.get(model))
        except GenError as error:
            raise ApiError(str(error), "model", "model_not_found", 404) from None

    @router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Return the page of the API."""
        return HTMLResponse(DOCS.read_text(encoding="utf-8"))

    return router


def _model(served: ServedModel) -> dict[str, Any]:
    """Return a model as OpenAI's API lists it, with its modality and endpoints."""
    kind = registry.get("modality", served.modality).media_kind
    endpoints = ENDPOINTS.get(served.modality) or ENDPOINTS.get(kind, ())
    endpoints += ("/v1/embeddings",) if served.embeds else ()
    return {
        "id": served.id,
        "object": "model",
        "created": 0,
        "owned_by": "gen",
        **({} if served.parent is None else {"parent": served.parent}),
        "gen": {"modality": served.modality, "endpoints": list(endpoints)},
    }


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the specification, whose errors are those that the server sends."""
    if app.openapi_schema:
        return app.openapi_schema
    spec = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path in spec["paths"].values():
        for method in METHODS:
            if method in path:
                path[method]["responses"].pop("422", None)
                path[method]["responses"]["4XX"] = {"description": "Error", "content": content}
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    texts = {k: {"type": ["string", "null"]} for k in ("message", "type", "param", "code")}
    error = {"type": "object", "properties": texts, "required": ["message", "type"]}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    spec["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    spec["security"] = [{"key": []}, {}]
    app.openapi_schema = spec
    return spec
