"""``/v1/motions`` and ``/v1/actions``: media that OpenAI's API does not know.

Their responses are lists as those of images are.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from gen.contracts.condition import Condition
from gen.contracts.modality import Modality
from gen.core.condition_parts import FILES
from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.pipeline.output import PipelineOutput
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Calls, Wanted, item_info
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import MOST_FRAMES, Name, SamplerFields, Text
from gen.serve.api.images import usage
from gen.serve.api.media import as_base64, encoded, given_bytes, given_file

MOST, MOST_OBSERVATIONS = 32, 256


class MotionRequest(SamplerFields):
    """Body of ``/v1/motions``."""

    model: Name = Field("motion", description="Id of a model that makes motions.")
    prompt: Text
    n: int | None = Field(1, ge=1, le=MOST)
    frames: int | None = Field(
        None, ge=1, le=MOST_FRAMES, description="Poses of the motion, 20 per second."
    )
    source: str | None = Field(None, description="Motion to edit: base64 of an .npz or .bvh file.")
    span: Name | None = Field(None, description="Part of the source that is made anew: 20:60.")
    prefix: str | None = Field(None, description="Motion that every output begins with.")
    response_format: Literal["joints", "npz", "bvh", "mp4"] | None = Field(
        None, description="Positions of the joints [poses, 22, 3], or a file as b64_json."
    )


class ActionRequest(SamplerFields):
    """Body of ``/v1/actions``."""

    model: Name = Field("action", description="Id of a policy.")
    observations: (
        dict[str, Any]
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_OBSERVATIONS)]
        | None
    ) = Field(
        None,
        description="One observation or a batch: observation.state, task, observation.image as"
        " base64 or data: URI.",
    )
    prompt: Text | None = Field(None, description="Task, where no observation is given.")
    n: int | None = Field(1, ge=1, le=MOST)


def motion_router(calls: Calls) -> APIRouter:
    """Return the routes of motions and actions."""
    router = APIRouter(tags=["motion and action"], route_class=BodyRoute)

    @router.post("/v1/motions")
    async def motions(body: MotionRequest, request: Request) -> dict[str, Any]:
        """Make motions of a person."""
        calls.served(body.model, ("motion",), "/v1/motions")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_motion, body, pipe.modality)
        output = await calls.output(wanted, request)
        return await run_in_threadpool(_motions, output, body.response_format or "joints")

    @router.post("/v1/actions")
    async def actions(body: ActionRequest, request: Request) -> dict[str, Any]:
        """Choose the next actions of a policy for every observation."""
        calls.served(body.model, ("action",), "/v1/actions")
        output = await calls.output(await run_in_threadpool(wanted_action, body), request)
        data = [
            {
                "index": i,
                "observation": i // (body.n or 1),
                "action": np.asarray(chunk).tolist(),
                "gen": item_info(output, i),
            }
            for i, chunk in enumerate(output.media)
        ]
        return listed(data, output)

    return router


def wanted_motion(body: MotionRequest, modality: Modality) -> Wanted:
    """Return what a body asks for. Raises ``ApiError`` for motions that cannot be read."""
    media = {k: given_file(modality, v, k) for k in ("source", "prefix") if (v := getattr(body, k))}
    start = EditSpec(span=body.span, frames=body.frames, **media)
    return Wanted.of(body, body.model, [body.prompt], n=body.n or 1, start=start)


def _motions(output: PipelineOutput, form: str) -> dict[str, Any]:
    """Return the response of motions."""
    assert output.served is not None, "a pipeline names the modality of its outputs"
    data: list[dict[str, Any]] = []
    for i, motion in enumerate(output.media):
        if form == "joints":
            made = {"joints": np.asarray(motion.joints, np.float64).round(5).tolist()}
        else:
            made = {"b64_json": as_base64(encoded(output.served, motion, form))}
        data.append({"index": i, **made, "gen": item_info(output, i)})
    return listed(data, output)


def listed(data: list[dict[str, Any]], output: PipelineOutput) -> dict[str, Any]:
    """Return the response of some outputs."""
    return {
        "object": "list",
        "created": int(time.time()),
        "model": output.model,
        "data": data,
        "usage": usage(output),
    }


def wanted_action(body: ActionRequest) -> Wanted:
    """Return what a body asks for: one item per observation and sample. Raises ``ApiError``."""
    if (body.observations is None) == (body.prompt is None):
        message = "expected one of observations and prompt"
        raise ApiError(message, "observations", "missing_parameter")
    prompts: list[Any] = [body.prompt]
    if body.observations is not None:
        several = body.observations
        several = several if isinstance(several, list) else [several]
        prompts = [
            Condition.of({"observation": _observation(o, f"observations.{i}")})
            for i, o in enumerate(several)
        ]
    return Wanted.of(body, body.model, prompts, n=body.n or 1, param="observations")


def _observation(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an observation whose images are bytes. Raises ``ApiError`` for the name of a file."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(FILES):
            if not isinstance(value, str):
                message = f"{name}.{key} is {shown(value)}; expected base64 or a data: URI"
                raise ApiError(message, f"{name}.{key}", "invalid_media")
            value = given_bytes(value, f"{name}.{key}")
        found[key] = value
    return found
