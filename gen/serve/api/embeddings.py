"""``/v1/embeddings``: vectors of texts, by models that say how theirs are made."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from gen.contracts.modality import Modality
from gen.engine.ticket import Compute
from gen.models.load.pooling import Pooling
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.request import GenerationRequest
from gen.pipeline.scoring import Check
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Calls, Wanted
from gen.serve.api.echo import listed, raw
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Name, Prompts
from gen.serve.api.media import as_base64


class EmbeddingRequest(Fields):
    """Body of ``/v1/embeddings``."""

    model: Name = Field(description="Id of an embedding model.")
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="base64 is that of float32, little-endian."
    )
    dimensions: int | None = Field(None, ge=1, description="First numbers that are kept.")
    deadline: float | None = Field(
        None, gt=0, description="Seconds after which the request fails (504)."
    )
    user: Name | None = Field(None, description="Taken for compatibility; not used.")
    safety_identifier: Name | None = Field(None, description="Taken for compatibility; not used.")


def embedding_router(calls: Calls) -> APIRouter:
    """Return the route of embeddings."""
    router = APIRouter(tags=["text"], route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """Return a vector of every text."""
        _require_embedding_model(calls, body.model)
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        assert pipe.pooling is not None, "the model is served as an embedding model"
        wanted = await run_in_threadpool(_wanted, body, pipe.modality, pipe.pooling)
        vectors, tokens = await calls.output(wanted, request)
        data = await run_in_threadpool(_written, vectors, body.encoding_format == "base64")
        counts = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body.model, "usage": counts}

    return router


def _require_embedding_model(calls: Calls, model: str) -> None:
    """Refuse a model that makes no embeddings. Raises ``ApiError``."""
    if calls.served(model, ("text",), "/v1/embeddings").embeds:
        return
    known = [served.id for served in calls.engine.models.list() if served.embeds]
    raise ApiError(
        f"model {model!r} makes no embeddings; expected one whose folder says how its hidden states"
        " are pooled (modules.json of sentence-transformers), and this server has"
        f" {', '.join(known) or 'none'}",
        "model",
        "model_of_another_endpoint",
    )


def _wanted(body: EmbeddingRequest, modality: Modality, pooling: Pooling) -> Wanted:
    """Return what a body asks for. Raises ``ApiError``."""
    prompts: list[Any] = [
        raw(pooling.prompt + given if isinstance(given, str) else given, modality, "input")
        for given in listed(body.input, "input")
    ]
    compute = _embedding(body.dimensions)
    return Wanted(body.model, prompts, deadline=body.deadline, param="input", compute=compute)


def _embedding(dimensions: int | None) -> Compute:
    """Return what computes vectors and the number of their tokens."""

    def compute(
        pipe: Pipeline, request: GenerationRequest, check: Check
    ) -> tuple[list[Tensor], int]:
        tokens = sum(pipe.prompt_lengths(request.items, request.spec))
        return pipe.embeddings(request.items, dimensions, check), tokens

    return compute


def _written(vectors: list[Tensor], packed: bool) -> list[dict[str, Any]]:
    """Return vectors as entries of a response; ``packed``: in base64."""
    entries: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        numbers = vector.numpy().astype("<f4")
        value = as_base64(numbers.tobytes()) if packed else numbers.tolist()
        entries.append({"object": "embedding", "index": index, "embedding": value})
    return entries
