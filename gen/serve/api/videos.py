"""``/v1/videos``: a clip is made while its client asks how far it is, and then fetched."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.engine.ticket import ItemStep
from gen.media.containers import av_module
from gen.pipeline.output import PipelineOutput
from gen.serve.api.calls import Call, Calls, Wanted, info_headers, item_info
from gen.serve.api.errors import ApiError, as_api_error
from gen.serve.api.fields import MOST_FRAMES, Name, SamplerFields, Text, only
from gen.serve.api.forms import body_of, form_schema
from gen.serve.api.media import TYPES, encoded, given_file

REFERENCE = "input_reference"
Limit = Annotated[int, Query(ge=1, le=100)]


class VideoRequest(SamplerFields):
    """Body of ``/v1/videos``."""

    model: Name = Field("video", description="Id of a model that makes clips.")
    prompt: Text
    input_reference: str | None = Field(
        None, description="Clip that the result goes on from: base64, data: URI, file of a form."
    )
    prefix_frames: int | None = Field(
        None, ge=1, description="Last frames of it that the result begins with; all without it."
    )
    seconds: Name | None = None
    size: Name | None = None
    frames: int | None = Field(
        None, ge=1, le=MOST_FRAMES, description="Length, where the model has no fixed one."
    )
    output_format: Literal["mp4", "gif", "mkv"] | None = None


@dataclass
class Clip:
    """Clip that is asked for.

    Attributes:
        id: name that the server gave it.
        created: Unix time of the request.
        body: the request.
        call: the engine's request.
        progress: percentage of its positions that are decided.
        completed: Unix time of the end.
        file: bytes of the clip.
        output: what the engine made, without its media.
        length: seconds of the clip.
        size: WIDTHxHEIGHT of its file.
        error: why there is none.
    """

    id: str
    created: int
    body: VideoRequest
    call: Call
    progress: int = 0
    completed: int | None = None
    file: bytes | None = None
    headers: dict[str, str] | None = None
    info: dict[str, Any] | None = None
    length: float = 0.0
    size: str = "auto"
    error: ApiError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the clip as OpenAI's API describes it."""
        state = {"waiting": "queued", "running": "in_progress"}.get(self.call.ticket.state)
        status = "failed" if self.error else "completed" if self.file else state or "in_progress"
        error = self.error and {"code": self.error.code or "failed", "message": str(self.error)}
        return {
            "id": self.id,
            "object": "video",
            "created_at": self.created,
            "completed_at": self.completed,
            "expires_at": None,
            "status": status,
            "progress": 100 if self.file else self.progress,
            "model": self.body.model,
            "prompt": self.body.prompt,
            "seconds": f"{self.length:g}",
            "size": self.size,
            "error": error,
            "remixed_from_video_id": None,
            "gen": self.info,
        }


class Clips:
    """Clips that were asked for; of those that are done the oldest go first.

    Args:
        most: finished clips that are kept.
    """

    def __init__(self, most: int):
        self.most = most
        self.clips: OrderedDict[str, Clip] = OrderedDict()
        self.tasks: set[asyncio.Task[None]] = set()

    def get(self, name: str) -> Clip:
        """Return a clip. Raises ``ApiError`` for an unknown one."""
        if name not in self.clips:
            raise ApiError(f"there is no video {shown(name)}", "video_id", "not_found", 404)
        return self.clips[name]

    def add(self, body: VideoRequest, call: Call) -> Clip:
        """Keep a clip that the engine makes."""
        clip = Clip(f"video_{secrets.token_hex(16)}", int(time.time()), body, call)
        self.clips[clip.id] = clip
        task = asyncio.create_task(self._finish(clip))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return clip

    async def _finish(self, clip: Clip) -> None:
        """Wait for a clip and write its file."""
        try:
            output = await clip.call.output()
            await run_in_threadpool(_write, clip, output)
        except Exception as error:
            clip.error = as_api_error(error)
        clip.completed = int(time.time())
        done = [c for c in self.clips.values() if c.completed is not None]
        for old in done[: -self.most]:
            del self.clips[old.id]


def _write(clip: Clip, output: PipelineOutput) -> None:
    """Write the file of a clip, and read its length and size from it."""
    assert output.served is not None, "a pipeline names the modality of its outputs"
    extension = clip.body.output_format or "mp4"
    file = encoded(output.served, output.media[0], extension)
    with TemporaryDirectory(prefix="gen-serve-") as folder:
        path = Path(folder) / f"clip.{extension}"
        path.write_bytes(file)
        with av_module("a video").open(str(path)) as container:
            stream = container.streams.video[0]
            clip.size = f"{stream.width}x{stream.height}"
            rate = float(stream.average_rate or 1)
    clip.length = len(output.media[0]) / rate
    clip.info, clip.headers = item_info(output, 0), info_headers(output)
    clip.file = file


def wanted_video(body: VideoRequest, modality: Modality, files: dict[str, list[bytes]]) -> Wanted:
    """Return what a body asks for.

    Args:
        body: the body.
        modality: modality of the model, as the model serves it.
        files: files of the form that the body came as.

    Raises:
        ApiError: the clip to go on from cannot be read, or a length that no model has.
    """
    only(body.seconds, (), "seconds", "the model decides the length; frames may state another")
    only(body.size, ("auto",), "size", "the model decides the size")
    given = [*files.get(REFERENCE, ()), *([body.input_reference] if body.input_reference else [])]
    prefix = given_file(modality, given[0], REFERENCE) if given else None
    if body.prefix_frames is not None:
        if prefix is None or body.prefix_frames > len(prefix):
            came = "no clip" if prefix is None else f"a clip of {len(prefix)} frames"
            message = f"prefix_frames is {body.prefix_frames} and {REFERENCE} is {came}"
            raise ApiError(message, "prefix_frames", "invalid_value")
        prefix = prefix[-body.prefix_frames :]
    start = EditSpec(prefix=prefix, frames=body.frames)
    return Wanted.of(body, body.model, [body.prompt], start=start)


def video_router(calls: Calls) -> APIRouter:
    """Return the routes of clips."""
    router = APIRouter(tags=["video"])
    clips = Clips(calls.settings.kept_videos)

    @router.post("/v1/videos", openapi_extra=form_schema(VideoRequest, (REFERENCE,)))
    async def create(request: Request) -> dict[str, Any]:
        """Begin to make a clip."""
        body, files = await body_of(request, VideoRequest, (REFERENCE,))
        calls.served(body.model, ("video",), "/v1/videos")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_video, body, pipe.modality, files)
        made: list[Clip] = []

        def on_step(step: ItemStep) -> None:
            if made:
                made[0].progress = int(100 * step.known.mean())

        call = await calls.start(wanted, on_step=on_step)
        made.append(clips.add(body, call))
        return made[0].to_dict()

    @router.get("/v1/videos")
    async def several(
        limit: Limit = 20, after: str | None = None, order: Literal["asc", "desc"] = "desc"
    ) -> dict[str, Any]:
        """List the clips that the server keeps."""
        found = list(clips.clips.values())
        return page([c.to_dict() for c in found], limit, after, order)

    @router.get("/v1/videos/{video_id}")
    async def one(video_id: str) -> dict[str, Any]:
        """Tell how far a clip is."""
        return clips.get(video_id).to_dict()

    @router.get("/v1/videos/{video_id}/content", response_class=Response)
    async def content(
        video_id: str, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
    ) -> Response:
        """Return the file of a clip that is done."""
        clip = clips.get(video_id)
        only(variant, ("video",), "variant", "clips are kept as they are")
        if clip.file is None:
            state = clip.to_dict()["status"]
            message = f"the video is {state}; expected completed"
            raise ApiError(message, "video_id", "video_not_ready", 409)
        kind = TYPES[clip.body.output_format or "mp4"]
        return Response(clip.file, 200, clip.headers, kind)

    @router.delete("/v1/videos/{video_id}")
    async def delete(video_id: str) -> dict[str, Any]:
        """Forget a clip; one that is being made is cancelled."""
        clip = clips.get(video_id)
        clip.call.ticket.cancel()
        del clips.clips[video_id]
        return {"id": video_id, "object": "video.deleted", "deleted": True}

    return router


def page(found: list[dict[str, Any]], limit: int, after: str | None, order: str) -> dict[str, Any]:
    """Return a page of a list, oldest first, as OpenAI's API pages lists.

    Args:
        found: objects with an ``id``.
        limit: objects of a page.
        after: id of the last object of the page before.
        order: ``asc`` or ``desc``.
    """
    ordered = found if order == "asc" else found[::-1]
    ids = [entry["id"] for entry in ordered]
    if after is not None:
        if after not in ids:
            raise ApiError(f"there is no {shown(after)} in the list", "after", "not_found", 404)
        ordered = ordered[ids.index(after) + 1 :]
    shown_ones = ordered[:limit]
    return {
        "object": "list",
        "data": shown_ones,
        "first_id": shown_ones[0]["id"] if shown_ones else None,
        "last_id": shown_ones[-1]["id"] if shown_ones else None,
        "has_more": len(ordered) > limit,
    }
