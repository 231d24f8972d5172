"""``/v1/images/generations`` and ``/v1/images/edits``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from gen.core.edit_spec import EditSpec
from gen.core.errors import shown
from gen.pipeline.output import PipelineOutput
from gen.pipeline.streaming import Chunk
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, item_info
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Name, SamplerFields, Text, only
from gen.serve.api.forms import body_of, form_schema
from gen.serve.api.media import as_base64, encoded, given_image

MOST = 10  # outputs of a request, as OpenAI's API has it
EXTENSIONS = {"png": "png", "webp": "webp", "jpeg": "jpg"}


class ImageFields(SamplerFields):
    """Fields of both endpoints."""

    model: Name = Field("image", description="Id of a model that makes images.")
    prompt: Text
    n: int | None = Field(1, ge=1, le=MOST)
    size: Name | None = Field(None, description="WIDTHxHEIGHT of the model's images, or auto.")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "webp", "jpeg"] | None = None
    stream: bool | None = None
    partial_images: int | None = Field(
        None, ge=0, le=3, description="Previews of each image; needs stream."
    )
    quality: Name | None = None
    background: Name | None = None
    moderation: Name | None = None
    style: Name | None = None
    output_compression: int | None = None
    input_fidelity: Name | None = None

    def require_supported(self) -> None:
        """Refuse what no model of gen can do. Raises ``ApiError``."""
        only(self.response_format, ("b64_json",), "response_format", "images have no addresses")
        only(self.quality, ("auto", "standard"), "quality", "a sampler decides the quality")
        only(self.background, ("auto", "opaque"), "background", "images are opaque")
        only(self.moderation, ("auto", "low"), "moderation", "nothing is moderated")
        only(self.style, (), "style", "the prompt says the style")
        only(self.output_compression, (100,), "output_compression", "PNG and WebP lose nothing")
        only(self.input_fidelity, ("high",), "input_fidelity", "pixels outside of the mask stay")
        if self.partial_images and not self.stream:
            message = f"partial_images is {self.partial_images} without stream; expected stream"
            raise ApiError(message, "partial_images", "invalid_value")


class ImageRequest(ImageFields):
    """Body of ``/v1/images/generations``."""


class EditRequest(ImageFields):
    """Body of ``/v1/images/edits``: an image and a mask, or an image and an instruction."""

    image: Text | list[Text] = Field(description="Base64 or data: URI; a file in a form.")
    mask: Text | None = Field(
        None, description="Image whose white, or transparent, parts are made anew."
    )


def image_router(calls: Calls) -> APIRouter:
    """Return the routes of images."""
    router = APIRouter(tags=["images"], route_class=BodyRoute)

    @router.post("/v1/images/generations")
    async def generations(body: ImageRequest, request: Request) -> Any:
        """Make images of a prompt."""
        calls.served(body.model, ("image",), "/v1/images/generations")
        wanted = Wanted.of(body, body.model, [body.prompt], n=body.n or 1)
        return await _answer(calls, body, wanted, request, "image_generation")

    @router.post("/v1/images/edits", openapi_extra=form_schema(EditRequest, ("image", "mask")))
    async def edits(request: Request) -> Any:
        """Make a part of an image anew, or change it by an instruction."""
        body, files = await body_of(request, EditRequest, ("image", "mask"))
        calls.served(body.model, ("image",), "/v1/images/edits")
        wanted = await run_in_threadpool(_edit, body, files)
        return await _answer(calls, body, wanted, request, "image_edit")

    return router


def _edit(body: EditRequest, files: dict[str, list[bytes]]) -> Wanted:
    """Return what an edit asks for: a mask region, or an instruction beside an image."""
    given = body.image if isinstance(body.image, list) else [body.image]
    images = files.get("image") or given
    if len(images) != 1:
        raise ApiError(f"{len(images)} images came; expected one", "image", "invalid_value")
    image = given_image(images[0], "image")
    masks = files.get("mask") or ([] if body.mask is None else [body.mask])
    if not masks:
        prompt = {"text": body.prompt, "images": image}
        return Wanted.of(body, body.model, [prompt], n=body.n or 1)
    mask = given_image(masks[0], "mask", alpha=True)
    if mask.mode == "RGBA" and np.asarray(mask.getchannel("A")).min() < 255:
        region = np.asarray(mask.getchannel("A")) == 0  # OpenAI's masks are transparent there
    else:
        region = np.asarray(mask.convert("L")) > 127
    start = EditSpec(source=image, mask=region)
    return Wanted.of(body, body.model, [body.prompt], n=body.n or 1, start=start)


async def _answer(
    calls: Calls, body: ImageFields, wanted: Wanted, request: Request, name: str
) -> Any:
    """Return the images, or the stream of their previews and of themselves."""
    body.require_supported()
    if body.stream:
        wanted.previews = body.partial_images or 0
        call = await calls.start(wanted, stream=True)
        first = await call.first(request)
        return event_stream(_events(call, first, body, name))
    output = await calls.output(wanted, request)
    return await run_in_threadpool(_images, output, body)


def _images(output: PipelineOutput, body: ImageFields) -> dict[str, Any]:
    """Return the response of whole images."""
    data = [
        {"b64_json": _file(output.served, image, body), "gen": item_info(output, i)}
        for i, image in enumerate(output.media)
    ]
    return {
        "created": int(time.time()),
        "data": data,
        "background": "opaque",
        "output_format": body.output_format or "png",
        "size": size_of(output.media[0]),
        "usage": usage(output),
    }


def _file(modality: Any, image: Any, body: ImageFields) -> str:
    """Return an image as base64. Raises ``ApiError`` if another size is asked for."""
    made = size_of(image)
    if body.size not in (None, "auto", made):
        message = f"size is {shown(body.size)}; model {body.model!r} makes {made}"
        raise ApiError(message, "size", "unsupported_value")
    return as_base64(encoded(modality, image, EXTENSIONS[body.output_format or "png"]))


async def _events(
    call: Call, first: Chunk | None, body: ImageFields, name: str
) -> AsyncIterator[bytes]:
    """Yield the events of a stream: previews, then every image with its figures."""
    modality = call.calls.engine.models.pipeline(body.model).modality
    shared = {
        "output_format": body.output_format or "png",
        "quality": "auto",
        "background": "opaque",
    }
    sent: Counter[int] = Counter()
    async for chunk in call.chunks(first):
        if not chunk.preview:
            continue  # it comes once more, with its figures
        index = chunk.item.index
        yield event(
            {
                "type": f"{name}.partial_image",
                "b64_json": await run_in_threadpool(_file, modality, chunk.media, body),
                "partial_image_index": sent[index],
                "created_at": int(time.time()),
                "size": size_of(chunk.media),
                **shared,
                "gen": {"index": index, "seed": chunk.item.seed},
            },
            named=True,
        )
        sent[index] += 1
    output = await call.output()
    for i, image in enumerate(output.media):
        yield event(
            {
                "type": f"{name}.completed",
                "b64_json": await run_in_threadpool(_file, output.served, image, body),
                "created_at": int(time.time()),
                "size": size_of(image),
                **shared,
                "usage": usage(output[i : i + 1]),
                "gen": {"index": i, **item_info(output, i)},
            },
            named=True,
        )


def size_of(image: Any) -> str:
    """Return ``WIDTHxHEIGHT`` of an image of Pillow, or an array [h, w, 3]."""
    height, width = np.asarray(image).shape[:2]
    return f"{width}x{height}"


def usage(output: PipelineOutput) -> dict[str, Any]:
    """Return the tokens of a response; those of prompts are not counted."""
    made = sum(stats.tokens for stats in output.stats)
    return {
        "input_tokens": 0,
        "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
        "output_tokens": made,
        "total_tokens": made,
    }
