"""``/v1/audio/speech``: spoken words, translations of speech, and sounds of clips.

A whole answer is a file. With ``stream_format``, and of ``pcm`` always, the sound goes out as it is
decoded; what is sent, joined, has the samples of the file.
"""

from __future__ import annotations

import io
import wave
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from gen.contracts.modality import Modality
from gen.core.errors import hint, shown
from gen.modalities.speech.modality import SpeechModality
from gen.modalities.speech.synth import SPEEDS, VOICES
from gen.pipeline.streaming import Chunk
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Call, Calls, Wanted, event, event_stream, info_headers, item_info
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Name, SamplerFields, Text, only
from gen.serve.api.media import TYPES, as_base64, encoded, given_bytes, wav_header

STREAMED = ("wav", "pcm")  # formats whose beginning does not depend on the end
NO_VOICE = ("", "auto", "default", "none")


class VoiceId(Fields):
    """Voice as an object."""

    id: Name


class SpeechRequest(SamplerFields):
    """Body of ``/v1/audio/speech``."""

    model: Name = Field("speech", description="Id of a model that makes sound.")
    input: Text = Field("", description="Words to speak, or the caption of a sound.")
    voice: Name | VoiceId | None = Field(
        None, description="low, middle or high; auto leaves it to the seed."
    )
    speed: float | Name | None = Field(None, description="slow, normal or fast; or 1.")
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] | None = Field(
        None, description="wav (default), pcm, flac or mp3."
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="Send the sound as it is decoded: wav or pcm, or events of them."
    )
    instructions: Text | None = None
    audio: str | None = Field(None, description="Speech to translate: base64 or data: URI.")
    video: str | None = Field(None, description="Clip to sound: base64 or data: URI.")
    image: str | None = Field(None, description="Image to sound: base64 or data: URI.")

    @property
    def format(self) -> str:
        """Format of the answer."""
        return self.response_format or "wav"

    @property
    def streams(self) -> bool:
        """True where the sound goes out as it is decoded."""
        return self.stream_format is not None or self.format == "pcm"

    def require_supported(self) -> None:
        """Refuse what no model of gen can do. Raises ``ApiError``."""
        formats = ("wav", "pcm", "flac", "mp3")
        only(self.response_format, formats, "response_format", "there is no such encoder")
        only(self.instructions, (), "instructions", "the input and the voice say everything")
        if self.stream_format is not None:
            why = "a stream begins before the length is known"
            only(self.format, STREAMED, "response_format", why)


def wanted_speech(body: SpeechRequest, modality: Modality) -> Wanted:
    """Return what a body asks for.

    Args:
        body: the body.
        modality: modality of the model, as the model serves it.

    Raises:
        ApiError: a voice or a speed that the model does not have, or media that cannot be read.
    """
    body.require_supported()
    said = [body.input] if body.input else []
    voice = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
    media = {k: v for k in ("audio", "video", "image") if (v := getattr(body, k))}
    speaks = isinstance(modality, SpeechModality) and not media
    if voice is not None and voice not in NO_VOICE:
        said.append(f"{_one_of('voice', voice, VOICES if speaks else ())} voice")
    if body.speed not in (None, 1):
        said.append(_one_of("speed", body.speed, SPEEDS if speaks else ()))
    parts = {k: given_bytes(v, k) for k, v in media.items()}
    text = ", ".join(said)
    if not text and not parts and modality.needs_prompt:
        raise ApiError("input is missing", "input", "missing_parameter")
    prompt = {"text": text, **parts} if parts else text
    return Wanted.of(body, body.model, [prompt], param="input")


def _one_of(param: str, value: Any, known: tuple[str, ...]) -> str:
    """Return a voice or a speed. Raises ``ApiError`` for one that the model does not have."""
    if value not in known:
        expected = " or ".join(known) or ("1" if param == "speed" else "auto")
        message = f"{param} is {shown(value)}; expected {expected}.{hint(value, known)}"
        raise ApiError(message, param, "unsupported_value")
    return value


def speech_router(calls: Calls) -> APIRouter:
    """Return the routes of sounds."""
    router = APIRouter(tags=["audio"], route_class=BodyRoute)

    @router.post("/v1/audio/speech", response_class=Response)
    async def speech(body: SpeechRequest, request: Request) -> Response:
        """Speak words, translate speech, or make the sound of a clip or caption."""
        calls.served(body.model, ("audio",), "/v1/audio/speech")
        pipe = await run_in_threadpool(calls.engine.models.pipeline, body.model)
        wanted = await run_in_threadpool(wanted_speech, body, pipe.modality)
        if not body.streams:
            output = await calls.output(wanted, request)
            assert output.served is not None, "a pipeline names the modality of its outputs"
            file = await run_in_threadpool(encoded, output.served, output.media[0], body.format)
            return Response(file, 200, info_headers(output), TYPES[body.format])
        call = await calls.start(wanted, stream=True)
        first = await call.first(request)
        plan = call.ticket.request
        headers = {
            "x-gen-seed": str(plan.items[0].seed),
            "x-gen-guarantee": pipe.guarantee(plan.sampler),
            "x-gen-sampler": str(plan.spec["name"]),
        }
        if body.stream_format == "sse":
            return event_stream(_events(call, first, body, pipe.modality), headers)
        sound = _sound(call, first, body, pipe.modality)
        return StreamingResponse(sound, 200, headers, TYPES[body.format])

    return router


async def _sound(
    call: Call, first: Chunk | None, body: SpeechRequest, modality: Modality
) -> AsyncIterator[bytes]:
    """Yield the bytes of a stream: samples, of WAV behind a header of unknown length."""
    begun = body.format == "pcm"
    async for chunk in call.chunks(first):
        if not len(chunk.media):
            continue
        rate, channels, samples = await run_in_threadpool(samples_of, modality, chunk.media)
        yield samples if begun else wav_header(rate, channels) + samples
        begun = True
    await call.output()


async def _events(
    call: Call, first: Chunk | None, body: SpeechRequest, modality: Modality
) -> AsyncIterator[bytes]:
    """Yield the same as events, and the figures of the sound at the end."""
    async for part in _sound(call, first, body, modality):
        yield event({"type": "speech.audio.delta", "audio": as_base64(part)}, named=True)
    output = await call.output()
    made = output.stats[0].tokens
    usage = {"input_tokens": 0, "output_tokens": made, "total_tokens": made}
    done = {"type": "speech.audio.done", "usage": usage, "gen": item_info(output, 0)}
    yield event(done, named=True)


def samples_of(modality: Modality, media: Any) -> tuple[int, int, bytes]:
    """Return the samples of a sound as the modality writes them: rate, channels and bytes."""
    with wave.open(io.BytesIO(encoded(modality, media, "wav"))) as file:
        samples = file.readframes(file.getnframes())
        return file.getframerate(), file.getnchannels(), samples
